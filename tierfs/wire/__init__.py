"""Pure protocol: framing, messages, handshake. No I/O."""

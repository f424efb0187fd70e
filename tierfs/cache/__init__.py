"""The block cache: what is in memory, what is on its way, and where it came from."""

"""Addresses as people write them: tcp://host:port, IPv6 in brackets. The transports, the server and sources call it."""

import ipaddress
import re
from dataclasses import dataclass

from tierfs.blocks.errors import ConfigError

DEFAULT_PORT = 7411
_HOST_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\[\]:/@?#\s]+))(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name or literal, no brackets) and a port; port 0 means any, for listeners."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_host_port(text: str, *, whole: str) -> Address:
    """``host``, ``host:port``, ``[v6]`` or ``[v6]:port``; raises ConfigError that quotes ``whole``."""
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{whole!r}: expected host:port, with an IPv6 address in brackets, e.g. [::1]:{DEFAULT_PORT}")
    port = DEFAULT_PORT if match["port"] is None else int(match["port"])
    if port > 65535:
        raise ConfigError(f"{whole!r}: port {port} is over 65535")
    if match["v6"] is not None:
        try:
            ipaddress.IPv6Address(match["v6"])
        except ValueError as error:
            raise ConfigError(f"{whole!r}: [{match['v6']}] is no IPv6 address") from error
    return Address(match["v6"] or match["host"], port)


def parse_address(text: str) -> Address:
    """``tcp://host:port``, or the same without the scheme. Raises ConfigError."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "tcp":
        raise ConfigError(f"{text!r}: expected tcp://host:port, not {scheme}://")
    return parse_host_port((rest if separator else text).removesuffix("/"), whole=text)


def is_loopback(host: str) -> bool:
    """Whether a literal address (as a socket names it) can only be reached from this machine."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)

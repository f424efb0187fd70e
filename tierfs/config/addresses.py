"""Addresses as people write them: where a server listens, and what a source URL names.

The loader checks with it; the transports, the server and the remote source use what it returns. Nothing here resolves a
name or opens anything.
"""

import ipaddress
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tierfs.blocks.errors import ConfigError

DEFAULT_PORT = 7411
EXPORT_LIMIT_BYTES = 255  # of a name in a URL and on the wire; names in a configuration are shorter and plainer

_UNIX_PATH_BYTES_MAX = 107  # sun_path of unix(7), and its last zero

_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|([^\s:/\[\]@?#]+))(?::(\d{1,5}))?", re.ASCII)
_REMOTE = re.compile(r"tierfs://([^/?#]*)(?:/([^/?#]*)/?)?")
_EXPORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """A host (a name, or an IP address without brackets) and a TCP port; port 0 lets the kernel choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host_port}"

    @property
    def host_port(self) -> str:
        """As in a URL of any scheme: an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. A name counts as loopback only if it is ``localhost``."""
        try:
            address = ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return self.host == "localhost"
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """``tierfs://host:port/export``; the export's name is empty for a server that exports one directory."""

    address: Address
    export: str


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """``dir:/path``."""

    path: str


def valid_export_name(name: str) -> bool:
    """Whether an export may have that name (the empty name is given by ``tierfs serve DIR`` alone)."""
    return _EXPORT.fullmatch(name) is not None


def parse_address(text: str) -> Address:
    """The address of ``tcp://host[:port]``, or of the same without the scheme. Raises ConfigError."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "tcp":
        raise ConfigError(f"{text!r}: expected tcp://HOST:PORT, not {scheme}://")
    return _parse_host_port((rest if separator else text).removesuffix("/"), whole=text)


def parse_listen(text: str) -> Address:
    """The address of ``tcp://host[:port]``, as a configuration must write it. Raises ConfigError."""
    if not text.startswith("tcp://"):
        raise ConfigError(f'{text!r} is not an address to listen on; write "tcp://HOST:PORT"')
    return parse_address(text)


def parse_metrics_listen(text: str) -> Path | Address:
    """The path of ``unix:/path``, or the address of ``tcp://host:port``. Raises ConfigError."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not PurePosixPath(path).is_absolute() or "\0" in path or len(path.encode()) > _UNIX_PATH_BYTES_MAX:
            raise ConfigError(f"{text!r} names no socket: an absolute path of at most {_UNIX_PATH_BYTES_MAX} bytes")
        return Path(path)
    address = parse_listen(text)
    if text.rstrip("/").endswith(f":{address.port}") and address.port:
        return address
    raise ConfigError(f"{text!r} has no port")


def parse_source_url(text: str) -> RemoteSource | DirectorySource:
    """What ``tierfs://host[:port]/export`` or ``dir:/path`` names. Raises ConfigError."""
    if text.startswith("dir:"):
        path = text.removeprefix("dir:")
        if not PurePosixPath(path).is_absolute() or "\0" in path:
            raise ConfigError(f'{text!r} does not name a directory; write "dir:/absolute/path"')
        return DirectorySource(path)
    if text.startswith("tierfs:"):
        return parse_remote_url(text)
    raise ConfigError(f'{text!r} is not a source; write "tierfs://HOST:PORT/EXPORT" or "dir:/path"')


def parse_remote_url(text: str) -> RemoteSource:
    """What ``tierfs://host[:port]/export`` names; the export is percent-decoded. Raises ConfigError."""
    match = _REMOTE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r}: expected tierfs://HOST:PORT/EXPORT")
    address = _parse_host_port(match[1], whole=text)
    if address.port == 0:
        raise ConfigError(f"{text!r}: port 0 cannot be connected to")
    try:
        export = urllib.parse.unquote(match[2] or "", errors="strict")
        name_bytes = len(export.encode())
    except UnicodeError as error:
        raise ConfigError(f"{text!r}: the export's name is not UTF-8") from error
    if name_bytes > EXPORT_LIMIT_BYTES:
        raise ConfigError(f"{text!r}: the export's name is longer than {EXPORT_LIMIT_BYTES} bytes")
    return RemoteSource(address, export)


def _parse_host_port(text: str, *, whole: str) -> Address:
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{whole!r}: expected HOST:PORT, with an IPv6 address in brackets, e.g. [::1]:{DEFAULT_PORT}")
    port = DEFAULT_PORT if match[3] is None else int(match[3])
    if port > 65535:
        raise ConfigError(f"{whole!r}: port {port} is over 65535")
    if match[1] is not None:
        try:
            ipaddress.IPv6Address(match[1])
        except ValueError as error:
            raise ConfigError(f"{whole!r}: [{match[1]}] is no IPv6 address") from error
    return Address(match[1] or match[2], port)

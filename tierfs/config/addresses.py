"""Addresses in the configuration: where a server listens, and what a source URL names.

Called by the loader to check them and by ``app`` to use them; nothing here resolves a name or opens anything.
"""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from tierfs.blocks.errors import ConfigError

DEFAULT_PORT = 7411

_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\s:/\[\]@?#]+))(?::(\d{1,5}))?", re.ASCII)
_EXPORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """A host (a name, or an IP address without brackets) and a TCP port; port 0 lets the kernel choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. A name counts as loopback only if it is ``localhost``."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host == "localhost"


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


def parse_listen(text: str) -> Address:
    """The address of ``tcp://host:port``. Raises ConfigError."""
    scheme, separator, rest = text.partition("://")
    address = _parse_host_port(rest.removesuffix("/")) if separator and scheme == "tcp" else None
    if address is None:
        raise ConfigError(f'{text!r} is not an address to listen on; write "tcp://HOST:PORT"')
    return address


def parse_source_url(text: str) -> RemoteSource | DirectorySource:
    """What ``tierfs://host[:port]/export`` or ``dir:/path`` names. Raises ConfigError."""
    if text.startswith("dir:"):
        path = text.removeprefix("dir:")
        if not PurePosixPath(path).is_absolute() or "\0" in path:
            raise ConfigError(f'{text!r} does not name a directory; write "dir:/absolute/path"')
        return DirectorySource(path)
    if text.startswith("tierfs://"):
        host_port, _, export = text.removeprefix("tierfs://").partition("/")
        address = _parse_host_port(host_port)
        export = export.removesuffix("/")
        if address is not None and address.port != 0 and (not export or valid_export_name(export)):
            return RemoteSource(address, export)
    raise ConfigError(f'{text!r} is not a source; write "tierfs://HOST:PORT/EXPORT" or "dir:/path"')


def _parse_host_port(text: str) -> Address | None:
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        return None
    if match[1] is not None:
        try:
            ipaddress.ip_address(match[1].partition("%")[0])
        except ValueError:
            return None
    port = int(match[3]) if match[3] is not None else DEFAULT_PORT
    return Address(match[1] or match[2], port) if port <= 65535 else None

"""The source: whether it answers, knows the token and has the export; and what the network's buffers can carry.

Called by examination.py. One connection is made, shakes hands and is closed.
"""

import math
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import trio

from tierfs.app.doctor.finding import Finding, note, ok, problem, warning
from tierfs.app.doctor.looking import read_text
from tierfs.app.secrets import client_tls
from tierfs.blocks.errors import AuthenticationFailed, NotFound, SourceUnavailable, TierfsError
from tierfs.blocks.units import format_bytes, format_duration
from tierfs.config import addresses
from tierfs.config.relations import load_token
from tierfs.config.schema import MountConfig
from tierfs.tiers.remote_link import open_link
from tierfs.wire.messages import NONCE_BYTES

CONNECT_S = 5.0  # at most; less where source.timeout is less
_WANTED_BYTES_PER_S = 1_250_000_000  # 10 Gbit/s


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """``trouble`` is empty where all is well; ``kind`` of it: unreachable, token, export, or other."""

    url: str
    trouble: str = ""
    kind: str = ""
    elapsed_s: float = 0.0  # for the connection and the handshake
    round_trip_s: float = 0.0  # 0: not known, or no network
    receive_buffer_bytes: int | None = None  # the most that one connection gets: tcp_rmem
    connections: int = 4
    tls: bool = False
    token: bool = False


def look(config: MountConfig | None, root: Path = Path("/")) -> SourceFacts | None:
    """None without a configuration. ``root`` is where /proc is found."""
    if config is None:
        return None
    source = addresses.parse_source_url(config.source.url)
    if isinstance(source, addresses.DirectorySource):
        return _directory(config, Path(source.path))
    buffers = (read_text(root / "proc/sys/net/ipv4/tcp_rmem") or "").split()
    timeout_s = connect_timeout_s(config)
    round_trip_s = _round_trip_s(source.address, timeout_s)
    started_s = time.monotonic()
    trouble, kind = "", ""
    try:
        trio.run(_shake_hands, config, source, timeout_s)
    except TierfsError as error:
        trouble, kind = " ".join(str(error).split()), _kind(error)
    except OSError as error:
        trouble, kind = error.strerror or str(error), "unreachable"
    return SourceFacts(
        url=config.source.url,
        trouble=trouble,
        kind=kind,
        elapsed_s=time.monotonic() - started_s,
        round_trip_s=round_trip_s,
        receive_buffer_bytes=int(buffers[2]) if len(buffers) == 3 else None,
        connections=config.source.connections,
        tls=config.source.tls,
        token=config.source.token_file is not None,
    )


def connect_timeout_s(config: MountConfig) -> float:
    """How long each of the two attempts may take."""
    return min(CONNECT_S, float(config.source.timeout))


def judge(facts: SourceFacts | None) -> list[Finding]:
    """Pure."""
    if facts is None:
        return []
    if not facts.trouble:
        took = f", answered in {format_duration(facts.elapsed_s)}" if facts.url.startswith("tierfs:") else ""
        with_ = [name for name, there in (("token", facts.token), ("TLS", facts.tls)) if there]
        accepted = f", {' and '.join(with_)} accepted" if with_ else ""
        return [ok("source.reachable", f"{facts.url} can be reached{took}{accepted}"), *_buffers(facts)]
    why = "only what is resident can be read without it, and a first mount is refused"
    if facts.kind == "token":
        mend = "source.token_file must hold the very token of the server's token_file for that export"
        return [problem("source.token", f"{facts.url} refuses: {facts.trouble}", why, mend)]
    if facts.kind == "export":
        mend = "correct source.url: the name after the slash is that of a table [exports.NAME] of the server"
        return [problem("source.export", f"{facts.url} refuses: {facts.trouble}", why, mend)]
    if facts.url.startswith("dir:"):
        mend = "mount what should be there, or correct source.url"
    elif facts.kind == "unreachable":
        mend = "start `tierfs serve` there; look at the address, server.listen (not only 127.0.0.1) and firewalls"
    else:
        mend = "use the same version of tierfs at both ends; source.tls must be what the server has"
    return [problem("source.reachable", f"{facts.url} cannot be used: {facts.trouble}", why, mend)]


def _directory(config: MountConfig, path: Path) -> SourceFacts:
    trouble = ""
    try:
        with os.scandir(path) as listing:
            if next(listing, None) is None:
                trouble = f"{path} is empty"
    except OSError as error:
        trouble = f"{path}: {error.strerror}"
    return SourceFacts(url=config.source.url, trouble=trouble, kind="unreachable" if trouble else "")


def _round_trip_s(address: addresses.Address, timeout_s: float) -> float:
    """The time of a TCP connection to the first of its addresses: one round trip; 0 where that one does not answer."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(timeout_s)
            started_s = time.monotonic()
            connection.connect(place)
            return time.monotonic() - started_s
    except OSError:
        return 0.0  # there may be others; the handshake tells


async def _shake_hands(config: MountConfig, source: addresses.RemoteSource, timeout_s: float) -> None:
    settings = config.source
    link = await open_link(
        source.address,
        export=source.export,
        token=None if settings.token_file is None else load_token(settings.token_file),
        nonce=os.urandom(NONCE_BYTES),
        tls=client_tls(enabled=settings.tls, ca_file=settings.tls_ca_file),
        connect_timeout_s=timeout_s,
        request_timeout_s=timeout_s,
    )
    with trio.CancelScope() as scope:
        scope.cancel()
        await link.run()  # closes it


def _kind(error: TierfsError) -> str:
    if isinstance(error, AuthenticationFailed):
        return "token"
    if isinstance(error, NotFound):
        return "export"
    return "unreachable" if isinstance(error, SourceUnavailable) else "other"


def _buffers(facts: SourceFacts) -> list[Finding]:
    """Bandwidth × delay: what must be under way to fill the network."""
    most = facts.receive_buffer_bytes
    if most is None or facts.round_trip_s <= 0:
        return []
    # Half of a buffer is the window: tcp_adv_win_scale.
    carried = most / 2 * facts.connections / facts.round_trip_s
    if carried >= _WANTED_BYTES_PER_S:
        return []
    needed = math.ceil(_WANTED_BYTES_PER_S * facts.round_trip_s * 2 / facts.connections)
    return [
        (warning if carried < _WANTED_BYTES_PER_S / 10 else note)(
            "source.receive_buffer",
            f"{facts.connections} connections with {format_bytes(most)} of buffer carry"
            f" {format_bytes(int(carried))}/s over {format_duration(facts.round_trip_s)}",
            "the kernel gives a connection no larger window than that",
            f'sysctl -w net.ipv4.tcp_rmem="4096 131072 {needed}" here, tcp_wmem alike on the server;'
            " or more source.connections",
        )
    ]

"""How blocks would come with this configuration: by RDMA, on which device, port and GID, or by TCP, and why.

Called by examination.py. Nothing is decided here: the source is made as a mount makes it, connects, begins RDMA and
fetches one block, into memory for that instead of memory.limit (which must be allowed to be pinned all the same).
"""

import ipaddress
import mmap
import re
from dataclasses import dataclass

import trio

from tierfs.app.doctor.finding import Finding, note, ok, problem, warning
from tierfs.app.parts import make_source
from tierfs.blocks.errors import TierfsError
from tierfs.blocks.ids import VersionId
from tierfs.blocks.spans import whole_block
from tierfs.blocks.units import format_bytes
from tierfs.catalog.schema import Kind, Publication
from tierfs.config.schema import MountConfig
from tierfs.formats.models import model_path
from tierfs.tiers.remote import RemoteSource
from tierfs.tiers.remote_rdma import RdmaPath

CONNECT_S = 5.0  # and the publication; less where source.timeout is less
TRY_S = 12.0  # for the queue pair, and for the READs of the block
_MTU_WANTED = 4096
# What mends a reason of tiers/remote_rdma.py, transport/rdma and server/rdma.py; the first that fits.
_MENDS = (
    (
        r"pyverbs",
        "apt-get install python3-pyverbs ibverbs-providers (for the system's Python), or pip install pyverbs",
    ),
    (
        r"there is no RDMA device here",
        "load the adapter's driver (lspci -nnk; modprobe mlx5_ib); to try soft-RoCE: modprobe rdma_rxe;"
        " rdma link add rxe0 type rxe netdev INTERFACE",
    ),
    (r"not active", "ip link set INTERFACE up; rdma link show"),
    (r"no RDMA device has", "name an address of the device in source.url and server.listen: rdma link; ip route get"),
    (r"RLIMIT_MEMLOCK", "LimitMEMLOCK=infinity in the systemd unit, or ulimit -l unlimited before tierfs"),
    (r"cannot be registered", "lower memory.limit, or free memory: free -g"),
    (r"offers no RDMA|switched off", "server.rdma_memory = \"512MiB\" in the server's configuration, and no TLS there"),
    (r"server\.rdma_memory", "raise server.rdma_memory in the server's configuration"),
    (r"cannot be opened", "modprobe ib_uverbs; ls -l /dev/infiniband; in a container --device /dev/infiniband"),
    (
        r"did not answer|READ did not end|did not come",
        "let UDP port 4791 through firewalls on the way (RoCE v2); ping -M do -s 4172 SERVER for the MTU",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TransportFacts:
    """``transport``: tcp or rdma, as the source says; ``reason``: why not RDMA. ``routes``: a text for each port."""

    wanted: str  # source.transport
    transport: str
    reason: str = ""
    routes: tuple[str, ...] = ()
    mtu_bytes: int = 0  # of the path, the smallest; 0 without RDMA
    link: str = ""  # Ethernet or InfiniBand
    connected: bool = True
    device: bool = True  # this machine has an RDMA device
    tried: bool = True  # RDMA is not even tried with transport = "tcp", or with TLS
    largest_model_bytes: int = 0  # of the publication; 0 where it did not come


def look(config: MountConfig | None) -> TransportFacts | None:
    """None without a remote source. Raises TierfsError: of what the configuration names."""
    source = None if config is None else make_source(config)
    if config is None or not isinstance(source, RemoteSource):
        return None
    return trio.run(try_source, config, source)


def deadline_s(config: MountConfig | None) -> float:
    """How long looking may take."""
    return 0.0 if config is None else _connect_s(config) + 2 * TRY_S


def judge(facts: TransportFacts | None) -> list[Finding]:
    """Pure."""
    if facts is None:
        return []
    name = "source.transport"
    if facts.transport == "rdma" and facts.routes and not facts.reason:
        what = f"blocks come by RDMA: {'; '.join(facts.routes)}; one was fetched"
        return [ok(name, what), *_mtu(facts)]
    if not facts.tried:
        return [ok(name, f"blocks come by TCP: {facts.reason}")]
    why = 'RDMA moves blocks without the processors; source.transport = "auto" uses TCP while it is not there'
    mend = f"{_mend(facts.reason)} (docs/RDMA.md)"
    if facts.wanted == "rdma" and (facts.connected or not facts.device):
        what = f'source.transport is "rdma", which cannot be used: {facts.reason}'
        why = "`tierfs mount` refuses it, and no block comes another way"
        return [problem(name, what, why, f'{mend}; or source.transport = "auto"')]
    if not facts.connected and facts.device:
        return [note(name, f"blocks come by RDMA or TCP: not known before the source answers: {facts.reason}")]
    what = f"blocks come by TCP, not by RDMA: {facts.reason}"
    return [warning(name, what, why, mend) if facts.device else note(name, what, why, mend)]


def _connect_s(config: MountConfig) -> float:
    return min(CONNECT_S, float(config.source.timeout))


async def try_source(config: MountConfig, source: RemoteSource) -> TransportFacts:
    """Run the source until it has fetched a block by RDMA, or said why not; all is closed again then."""
    reader = source.rdma
    publication: Publication | None = None
    paths: tuple[RdmaPath, ...] = ()
    reason, device, connected = "", False, False
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        try:
            if reader is not None:
                device = reader.has_device()
            with trio.move_on_after(_connect_s(config)):
                publication = await source.publication()
                connected = True
            if reader is not None and not connected:
                reader.check()
            if reader is not None and publication is not None:
                paths, reason = await _begin(config, source, publication)
        except TierfsError as error:
            reason = " ".join(str(error).split())
        statistics = source.statistics()
        nursery.cancel_scope.cancel()
    if not connected:
        reason = reason or statistics.reason or "the source published nothing in time"
    return TransportFacts(
        wanted=config.source.transport,
        transport=statistics.transport,
        reason=reason or statistics.transport_reason,
        routes=tuple(dict.fromkeys(_text(path) for path in paths)),
        mtu_bytes=min((path.mtu_bytes for path in paths), default=0),
        link=paths[0].port.link if paths else "",
        connected=connected,
        device=device,
        tried=reader is not None,
        largest_model_bytes=0 if publication is None else _largest_model_bytes(publication),
    )


async def _begin(
    config: MountConfig, source: RemoteSource, publication: Publication
) -> tuple[tuple[RdmaPath, ...], str]:
    """As app/mount does, and one block: the paths there were, and why they are of no use."""
    reader = source.rdma
    assert reader is not None, "the caller asks"
    block_bytes = publication.catalog.block_bytes
    memory = memoryview(mmap.mmap(-1, block_bytes))
    source.count_in(block_bytes)
    await source.use_memory(memory, block_bytes=block_bytes, key="memory.limit", pinned_bytes=int(config.memory.limit))
    with trio.move_on_after(TRY_S):
        await reader.tried()
    paths = reader.paths
    file = next((entry for entry in publication.catalog.entries if entry.kind is Kind.FILE and entry.size_bytes), None)
    if not paths or file is None:
        return paths, ""
    span = whole_block(file.size_bytes, block_bytes, 0)
    with trio.move_on_after(TRY_S):
        await source.read_into(VersionId(file.version), span, memory[: span.length_bytes])
    if source.statistics().rdma_blocks:
        return paths, ""
    failure = next((path.queue.failure for path in paths if path.queue.failure), "a block did not come by RDMA in time")
    return paths, f"RDMA: {failure}"


def _text(path: RdmaPath) -> str:
    address = ipaddress.IPv6Address(path.gid.raw)
    return f"{path.port}, GID {path.gid.index} ({address.ipv4_mapped or address}), MTU {format_bytes(path.mtu_bytes)}"


def _largest_model_bytes(publication: Publication) -> int:
    sizes: dict[bytes, int] = {}
    paths: list[bytes] = []  # of entries so far: the root first, a parent before its children
    for entry in publication.catalog.entries:
        above = paths[entry.parent] if paths else b""
        paths.append(above + b"/" + entry.name if above else entry.name)
        if entry.kind is Kind.FILE:
            model = model_path(paths[-1])
            sizes[model] = sizes.get(model, 0) + entry.size_bytes
    return max(sizes.values(), default=0)


def _mend(reason: str) -> str:
    return next((mend for pattern, mend in _MENDS if re.search(pattern, reason)), "look at the logs of both ends")


def _mtu(facts: TransportFacts) -> list[Finding]:
    if facts.link != "Ethernet" or facts.mtu_bytes >= _MTU_WANTED:
        return []
    what = f"RDMA sends packets of {format_bytes(facts.mtu_bytes)}"
    why = f"up to {format_bytes(_MTU_WANTED)} go into one where the interface's MTU is 4200 or more, at both ends"
    return [note("rdma.mtu", what, why, "ip link set INTERFACE mtu 4200 (and the switches; both ends)")]

"""The remote source: an export of a `tierfs serve`, over several parallel connections.

``app`` builds it from ``source.url``; the block cache is its caller. Each connection reconnects by itself. One task
follows what the server publishes, over whichever connection is up. What must hold: a request is answered or fails
within ``request_timeout_s`` of its last progress; a lost connection fails its requests at once (the cache retries);
nothing that a server sends makes this side allocate more than a limit named here.

    connecting --> connected <--> down     down: no connection is up; ``reason`` says why
"""

import dataclasses
import logging
import math
import mmap
import random
import secrets
import ssl
import time
from collections.abc import Callable, Mapping

import trio

from tierfs.blocks.errors import (
    AuthenticationFailed,
    ConfigError,
    NotFound,
    ProtocolError,
    SourceRefused,
    SourceUnavailable,
    StaleVersion,
    TierfsError,
)
from tierfs.blocks.ids import BlockDigest, ContentId, VersionId
from tierfs.blocks.spans import Span
from tierfs.catalog.schema import Catalog, Publication, catalog_digest, decode
from tierfs.config.addresses import parse_remote_url
from tierfs.tiers.interface import SourceStatistics
from tierfs.tiers.remote_link import Link, open_link
from tierfs.tiers.remote_rdma import RdmaReader
from tierfs.wire import messages as m

log = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.1
_BACKOFF_LAST_S = 5.0
_BACKOFF_WANTED_S = 0.25  # when a reader waits: what is between two attempts at least
_RDMA_TRIES = 2  # through different queue pairs, as one that fails is gone
_FOLLOW_PAUSE_S = 0.05  # bounds what a server with endless news can cost
_REFUSALS = (AuthenticationFailed, NotFound, ProtocolError, SourceRefused)  # trying again at once does not help


class RemoteSource:
    """Implements ``tierfs.tiers.interface.Source``."""

    def __init__(
        self,
        url: str,
        *,
        token: bytes | None = None,
        connections: int = 4,
        tls: ssl.SSLContext | None = None,
        connect_timeout_s: float = 10.0,
        request_timeout_s: float = 15.0,
        max_in_flight_blocks: int = 64,
        rdma: RdmaReader | None = None,
        rdma_only: bool = False,
        no_rdma_reason: str = "",
        catalog_limit_bytes: int = 1 << 30,  # ENTRIES_LIMIT of 200 bytes each
        jitter: random.Random | None = None,
        nonce: Callable[[], bytes] = lambda: secrets.token_bytes(m.NONCE_BYTES),
    ) -> None:
        """``jitter`` spreads reconnects; pass a seeded one to make them repeatable. Raises ConfigError.

        ``rdma`` brings blocks where it can, with ``rdma_only`` nothing else does. Without it ``no_rdma_reason`` is what
        `status` says.
        """
        named = parse_remote_url(url)
        self._address, self._export = named.address, named.export
        if token is not None and not token:
            raise ConfigError("the token of the source is empty")
        if connections < 1 or max_in_flight_blocks < 1:
            raise ConfigError(f"{url!r}: at least one connection and one block in flight are needed")
        self._token = token
        self._connections = connections
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._max_in_flight_blocks = max_in_flight_blocks
        self._catalog_limit_bytes = catalog_limit_bytes
        self._jitter = jitter or random.Random()
        self._nonce = nonce
        self._rdma = rdma
        self._rdma_only = rdma_only
        self._no_rdma_reason = no_rdma_reason
        self._block_bytes = 0
        self._links: list[Link] = []
        self._slots = trio.CapacityLimiter(max_in_flight_blocks)
        self._statistics = SourceStatistics(url=url, since_s=time.time(), transport="tcp")
        self._refusal: TierfsError | None = None  # why trying again at once does not help
        self._publication: Publication | None = None
        self._changed = trio.Event()  # links, refusal or publication
        self._wanted = trio.Event()  # somebody asked while no connection was up
        self._decode_limiter = trio.CapacityLimiter(1)
        # What the publication was made of, as the server names it.
        self._boot = b""
        self._digest = b""
        self._known_contents = 0
        self._versions: frozenset[bytes] = frozenset()

    def statistics(self) -> SourceStatistics:
        """A copy of the counters and the state; never waits."""
        statistics = dataclasses.replace(
            self._statistics, connections=len(self._links), transport_reason=self._no_rdma_reason
        )
        if self._rdma is not None:
            ports = self._rdma.ports
            statistics.transport = "rdma" if ports or self._rdma_only else "tcp"
            statistics.transport_reason = self._rdma.reason
            statistics.device = ",".join(port.device for port in ports)
            statistics.port = ",".join(str(port.number) for port in ports)
            statistics.rdma_blocks, statistics.rdma_bytes = self._rdma.blocks, self._rdma.bytes
            statistics.rdma_failures, statistics.rdma_failed_reads = self._rdma.failures, self._rdma.failed_reads
        return statistics

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the connections and the publication up. Cancel to close; requests under way then fail."""
        task_status.started()
        try:
            async with trio.open_nursery() as around:
                if self._rdma is not None:
                    await around.start(self._rdma.run)
                async with trio.open_nursery() as nursery:  # ends first: the paths of its links are on those devices
                    for number in range(self._connections):
                        nursery.start_soon(self._keep_connected, number)
                    nursery.start_soon(self._follow)
        finally:
            self._set_state("closed", "")

    async def publication(self) -> Publication:
        """The newest publication; waits for the first one while the server cannot be reached (the caller sets the
        deadline). Raises AuthenticationFailed, NotFound, ProtocolError, SourceRefused when the server will not have us.
        """
        while self._publication is None:
            if self._refusal is not None:
                raise type(self._refusal)(str(self._refusal)) from self._refusal
            await self._changed.wait()
        return self._publication

    async def wait_changed(self, revision: int) -> Publication:
        """Wait for another revision; a source that is down has none until it is back. Cancellation leaves nothing."""
        while self._publication is None or self._publication.revision == revision:
            await self._changed.wait()
        return self._publication

    def count_in(self, block_bytes: int) -> None:
        """See Source; the server compares."""
        self._block_bytes = block_bytes

    async def read_into(self, version: VersionId, span: Span, buffer: memoryview) -> BlockDigest:
        """Fill ``buffer`` with that span; the digest the server claims for the block. See the interface."""
        assert len(buffer) == span.length_bytes, "the buffer has the length of the span"
        block_bytes = self._block_bytes
        if not block_bytes and self._publication is not None:
            block_bytes = self._publication.catalog.block_bytes
        asked = (version, span.block, span.start_bytes, span.length_bytes, block_bytes)
        try:
            # As who holds the slot, the call and not the task: a task may have several calls under way in time.
            async with _Slot(self._slots):
                digest = None
                if self._rdma is not None:
                    digest = await self._read_by_rdma(self._rdma, m.LeaseBlock(*asked), buffer)
                if digest is None:
                    digest = await self._read_by_tcp(m.ReadBlock(*asked), buffer)
        except (ProtocolError, AuthenticationFailed) as error:  # as an answer to this request
            self._statistics.failed_requests += 1
            raise SourceRefused(f"block {span.block}: {error}") from error
        except TierfsError:
            self._statistics.failed_requests += 1
            raise
        self._statistics.fetched_blocks += 1
        self._statistics.fetched_bytes += span.length_bytes
        return digest

    async def _read_by_tcp(self, message: m.ReadBlock, buffer: memoryview) -> BlockDigest:
        link = self._least_loaded()
        link.load += 1
        try:
            reply = await link.request(message, m.Type.BLOCK_DATA, buffer=buffer)
        finally:
            link.load -= 1
        assert isinstance(reply.message, m.BlockData), "the link checks the type of a reply"
        return BlockDigest(reply.message.digest)

    async def _read_by_rdma(self, rdma: RdmaReader, message: m.LeaseBlock, buffer: memoryview) -> BlockDigest | None:
        """The block through one queue pair, or another; None where it has to come by TCP. Raises like read_into."""
        failure: SourceUnavailable | None = None
        begun_s = trio.current_time()
        for _ in range(_RDMA_TRIES):
            path = rdma.path(buffer)
            if path is None:
                break
            try:
                digest = await path.fetch(message, buffer)
            except SourceUnavailable as error:
                log.debug("rdma_retry url=%s block=%d reason=%s", self._statistics.url, message.block, error)
                rdma.failures += 1
                failure = error
                if trio.current_time() - begun_s > self._request_timeout_s / 2:
                    raise  # the caller has a deadline, and knows whether anybody still waits
                continue
            rdma.blocks += 1
            rdma.bytes += message.length_bytes
            return digest
        if self._rdma_only and self._links:
            reason = failure or rdma.reason or "no queue pair has room for this block"
            raise SourceUnavailable(f"source.transport is rdma, and there is none now: {reason}") from failure
        return None

    # RDMA

    @property
    def rdma(self) -> RdmaReader | None:
        """What brings blocks by RDMA; None where RDMA is not even tried."""
        return self._rdma

    async def use_memory(
        self, memory: memoryview, *, block_bytes: int, key: str, pinned_bytes: int | None = None
    ) -> None:
        """Blocks will be read into this memory (``key`` sizes it), which outlives the source: RDMA may begin.
        ``pinned_bytes``: see ``RdmaReader.offer``.

        Raises SourceUnavailable where RDMA is wanted alone and cannot be had.
        """
        if self._rdma is None:
            return
        if self._rdma_only:
            self._rdma.check()
        self._rdma.offer(memory, block_bytes=block_bytes, key=key, pinned_bytes=pinned_bytes)
        if self._rdma_only and self._links:
            with trio.move_on_after(self._connect_timeout_s):
                if not await self._rdma.tried():
                    raise SourceUnavailable(self._rdma.reason)

    # connections

    def _least_loaded(self) -> Link:
        links = [link for link in self._links if link.has_room]
        if links:
            return min(links, key=lambda link: (link.doubted, link.load))
        if self._links:
            raise SourceUnavailable(f"{self._address}: every connection is busy")
        self._wanted.set()
        self._wanted = trio.Event()
        if self._refusal is not None:
            raise SourceRefused(f"{self._statistics.url}: {self._refusal}") from self._refusal
        raise SourceUnavailable(
            f"{self._statistics.url} is {self._statistics.state}: {self._statistics.reason or 'no connection yet'}"
        )

    async def _keep_connected(self, number: int) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while True:
            connected_s = None
            try:
                link = await open_link(
                    self._address,
                    export=self._export,
                    token=self._token,
                    nonce=self._nonce(),
                    tls=self._tls,
                    connect_timeout_s=self._connect_timeout_s,
                    request_timeout_s=self._request_timeout_s,
                    features=() if self._rdma is None else (m.RDMA_FEATURE,),
                    turn=0 if self._rdma is None else number,  # several addresses are several RDMA ports
                )
            except TierfsError as error:
                failure = error
            else:
                connected_s = trio.current_time()
                self._add(link)
                try:
                    async with trio.open_nursery() as beside:
                        if self._rdma is not None:
                            beside.start_soon(self._rdma.keep, link)
                        failure = await link.run()
                        beside.cancel_scope.cancel()
                finally:
                    self._remove(link)
                if link.silent:  # a server or a firewall that was started again forgets all connections at once
                    for other in self._links:
                        other.doubt()
            if not self._links:
                # What ended a connection that had been made is no reason not to make it again.
                refused = connected_s is None and isinstance(failure, _REFUSALS)
                self._refusal = failure if refused else None
                self._set_state("down", str(failure))
            if connected_s is not None and trio.current_time() - connected_s > _BACKOFF_LAST_S:
                backoff_s = _BACKOFF_FIRST_S
            await self._back_off(backoff_s * self._jitter.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, _BACKOFF_LAST_S)

    async def _back_off(self, delay_s: float) -> None:
        with trio.move_on_after(delay_s):
            await trio.sleep(_BACKOFF_WANTED_S)
            await self._wanted.wait()

    def _add(self, link: Link) -> None:
        self._links.append(link)
        self._refusal = None
        self._size_slots()
        self._set_state("connected", "")

    def _remove(self, link: Link) -> None:
        self._links.remove(link)
        self._size_slots()

    def _size_slots(self) -> None:
        room = sum(link.max_requests for link in self._links)
        self._slots.total_tokens = max(1, min(self._max_in_flight_blocks, room))

    def _set_state(self, state: str, reason: str) -> None:
        statistics = self._statistics
        if (statistics.state, statistics.reason) != (state, reason):
            if statistics.state != state:
                statistics.since_s = time.time()
                level = logging.WARNING if state == "down" else logging.INFO
                log.log(level, "source_%s url=%s reason=%s", state, statistics.url, reason)
            statistics.state, statistics.reason = state, reason
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # the publication

    async def _follow(self) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while True:
            while not self._links:
                await self._changed.wait()
            try:
                await self._follow_once(self._links[0])
                backoff_s = _BACKOFF_FIRST_S
                await trio.sleep(_FOLLOW_PAUSE_S)
                continue
            except (StaleVersion, SourceUnavailable) as error:
                # The catalog changed while it was fetched, or the link was lost: ask anew.
                log.debug("catalog_retry url=%s reason=%s", self._statistics.url, error)
            except TierfsError as error:
                if self._statistics.reason != str(error):
                    log.warning("catalog_refused url=%s reason=%s", self._statistics.url, error)
                if self._publication is None:
                    self._refusal = error
                self._statistics.reason = str(error)
                self._notify()
            await trio.sleep(backoff_s * self._jitter.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, _BACKOFF_LAST_S)

    async def _follow_once(self, link: Link) -> None:
        watch = m.Watch(boot=self._boot, catalog_digest=self._digest, known_contents=self._known_contents)
        reply = await link.request(watch, m.Type.CHANGED, data_limit_bytes=m.CONTENTS_LIMIT_BYTES, timeout_s=math.inf)
        changed = reply.message
        assert isinstance(changed, m.Changed), "the link checks the type of a reply"
        if len(reply.data) % m.CONTENT_PAIR_BYTES:
            raise ProtocolError("the server sent content ids that are not whole pairs")
        known = (changed.boot, changed.catalog_digest) == (self._boot, self._digest)
        if changed.first_content != (self._known_contents if known else 0) or (known and not reply.data):
            raise ProtocolError("the server's news do not follow what was known")

        catalog, versions = None if self._publication is None else self._publication.catalog, self._versions
        if catalog is None or changed.catalog_digest != self._digest:
            catalog, versions = await self._fetch_catalog(link, changed)
        # No checkpoint from here on: publication and what it was made of change together.
        pairs = reply.data
        contents: dict[VersionId, ContentId] = {}
        if self._publication is not None:
            contents = _kept(self._publication.contents, versions, same=versions is self._versions)
        for start in range(0, len(pairs), m.CONTENT_PAIR_BYTES):
            version = bytes(pairs[start : start + 16])
            if version in versions:  # nothing else is kept: so many there can be, and no more
                contents.setdefault(VersionId(version), ContentId(bytes(pairs[start + 16 : start + 32])))
        self._boot, self._digest, self._versions = changed.boot, changed.catalog_digest, versions
        self._known_contents = changed.first_content + len(pairs) // m.CONTENT_PAIR_BYTES
        before = self._publication
        if before is None or catalog is not before.catalog or len(contents) != len(before.contents):
            revision = 1 if before is None else before.revision + 1
            self._publication = Publication(catalog, contents, revision)
            self._refusal = None
            self._notify()

    async def _fetch_catalog(self, link: Link, changed: m.Changed) -> tuple[Catalog, frozenset[bytes]]:
        size_bytes = changed.catalog_bytes
        if not 0 < size_bytes <= self._catalog_limit_bytes:
            raise ProtocolError(f"the catalog has {size_bytes} bytes; the limit is {self._catalog_limit_bytes}")
        # Anonymous memory is only taken as it is filled, so that a server must send what it makes us allocate.
        with mmap.mmap(-1, size_bytes) as memory, memoryview(memory) as whole:
            for offset in range(0, size_bytes, m.CATALOG_PART_LIMIT_BYTES):
                with whole[offset : offset + m.CATALOG_PART_LIMIT_BYTES] as part:
                    await link.request(
                        m.GetCatalog(changed.catalog_digest, offset, len(part)), m.Type.CATALOG_PART, buffer=part
                    )
            return await trio.to_thread.run_sync(
                _decode_catalog, whole, changed.catalog_digest, limiter=self._decode_limiter
            )


class _Slot:
    """``async with`` a token of a limiter, held by the call itself."""

    def __init__(self, limiter: trio.CapacityLimiter) -> None:
        self._limiter = limiter

    async def __aenter__(self) -> None:
        await self._limiter.acquire_on_behalf_of(self)

    async def __aexit__(self, *_: object) -> None:
        self._limiter.release_on_behalf_of(self)


def _decode_catalog(encoded: memoryview, digest: bytes) -> tuple[Catalog, frozenset[bytes]]:
    """In a thread: a catalog of 100,000 entries takes a good part of a second."""
    if catalog_digest(encoded) != digest:
        raise ProtocolError("the catalog does not match its digest")
    catalog = decode(encoded)
    return catalog, frozenset(entry.version for entry in catalog.entries if entry.version)


def _kept(
    contents: Mapping[VersionId, ContentId], versions: frozenset[bytes], *, same: bool
) -> dict[VersionId, ContentId]:
    """The content ids that are still of use with these versions: a version's content never changes."""
    return dict(contents) if same else {version: id_ for version, id_ in contents.items() if version in versions}

"""A directory as a source: scans it, publishes generations, digests its files in the background, reads its blocks.

Called by the server (``tierfs serve``), and by the block cache where the source's url is ``dir:``.

    scan loop ──> adopt: same tree? nothing : new generation ──┬──────────────────> publication
                                                               └──> digester ──┐         ^
    reads (read_into, open_block) ── digests seen on the way ──────────────────┴──> contents

All state is the trio thread's; threads get paths, facts, descriptors and buffers. What must hold: a catalog is
published only if the tree was like that at one instant; bytes are handed out only if their file was that version
before and after the read; a digest is remembered only if a later change of the file must show in its stat.
"""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from tierfs.blocks.errors import ConfigError, SourceRefused, SourceUnavailable, StaleVersion, TierfsError
from tierfs.blocks.ids import BlockDigest, VersionId
from tierfs.blocks.spans import Span, block_count, block_length
from tierfs.catalog import schema
from tierfs.catalog.beneath import open_root
from tierfs.catalog.digest_store import DigestStore, store_path
from tierfs.catalog.scan import Scan, scan_tree
from tierfs.catalog.schema import Catalog, Publication
from tierfs.tiers.directory_digests import Digester
from tierfs.tiers.directory_files import Buffers, OpenFiles, check_unchanged, read_block, read_piece
from tierfs.tiers.directory_versions import Version, Versions, new_versions
from tierfs.tiers.interface import SourceStatistics

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_READ_THREADS = 16
_BUFFERS = 16
_BUFFER_TIMEOUT_S = 10.0
_PUBLISH_INTERVAL_S = 0.2  # content ids arrive in batches
_FLUSH_INTERVAL_S = 1.0
_HOUSEKEEPING_INTERVAL_S = 5.0
_RESTLESS = "the tree keeps changing; it is published when it comes to rest"
_LOGGED_PATHS = 10_000  # how many unreadable paths are remembered as logged


@dataclass(frozen=True, slots=True)
class BlockReading:
    """One block, ready to be sent: from ``fd`` at ``offset_bytes`` where its digest was known, else from ``data``."""

    digest: BlockDigest
    length_bytes: int
    fd: int | None = None
    offset_bytes: int = 0
    data: memoryview | None = None


class DirectorySource:
    """A Source (see tiers.interface) over a local directory, with ``open_block`` for the server on top.

    With ``digest`` False nothing is read in the background; the digests of blocks that are read are remembered all
    the same, and a file gets its content id once all its blocks have been seen. Without ``state_directory`` nothing
    outlives the process.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        name: str,
        block_bytes: int,
        state_directory: Path | None,
        settle_s: float = 0.0,
        rescan_s: float = 2.0,
        digest_workers: int = 2,
        digest: bool = True,
    ) -> None:
        """``name`` is the export's; nothing is opened before ``run``."""
        self._path = Path(path)
        self._name = name
        self._block_bytes = self._asked_block_bytes = block_bytes
        self._settle_s = settle_s
        self._rescan_s = rescan_s
        self._statistics = SourceStatistics(url=f"dir:{self._path}", transport="file", since_s=time.time())
        if state_directory is not None and state_directory.resolve().is_relative_to(self._path.resolve()):
            raise ConfigError(
                f"the state directory {state_directory} lies inside the exported directory {self._path}; "
                "each change of the state would be a new generation: choose one outside"
            )

        self._device = 0  # of the root, when it was scanned
        self._tree = b""  # digest of the entries that are published
        self.scans = 0  # how many scans succeeded in this life
        self._publication: Publication | None = None
        self._changed = trio.Event()  # replaced at every publication
        self._contents_grew = trio.Event()
        self._versions = Versions(block_bytes)
        self._logged: set[bytes] = set()
        self._skipped: dict[str, int] = {}

        self._store_path = store_path(state_directory, name) if state_directory is not None else None
        self._store: DigestStore | None = None  # opened and used in the one thread of _store_limiter
        self._store_trouble = ""

        self._scan_limiter = trio.CapacityLimiter(1)
        self._store_limiter = trio.CapacityLimiter(1)
        self._read_limiter = trio.CapacityLimiter(_READ_THREADS)
        self._files = OpenFiles(self._path, self._read_limiter)
        self._buffers = Buffers(count=_BUFFERS, block_bytes=block_bytes, timeout_s=_BUFFER_TIMEOUT_S)
        self._digester = Digester(
            self._path,
            versions=self._versions,
            block_bytes=block_bytes,
            workers=digest_workers if digest else 0,
            learn=self._learn,
        )

    @property
    def digest_read_bytes(self) -> int:
        """How many bytes were read in the background for digests, in this life."""
        return self._digester.read_bytes

    # --- Source ---

    def statistics(self) -> SourceStatistics:
        """Counters and state; never waits."""
        self._statistics.digested_bytes = self._versions.digested_bytes
        self._statistics.digest_total_bytes = self._versions.total_bytes
        return self._statistics

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Scan, publish and digest until cancelled. Cancellation leaves a thread that hangs in the directory behind.

        Digests found so far are stored before it returns.
        """
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._scan_loop)
                nursery.start_soon(self._publish_loop)
                nursery.start_soon(self._store_loop)
                nursery.start_soon(self._housekeeping_loop)
                nursery.start_soon(self._digester.run)
        finally:
            self._set_state("closed", "")
            with trio.CancelScope(shield=True):
                await self._flush(unfinished=True)
                if self._store is not None:
                    await self._with_store(DigestStore.close, None)
                    self._store = None
                await self._files.aclose()

    async def publication(self) -> Publication:
        """The newest publication; waits for the first one."""
        return await self.wait_changed(0)

    async def wait_changed(self, revision: int) -> Publication:
        """Wait until the publication has another revision than this one, and return it."""
        while self._publication is None or self._publication.revision == revision:
            await self._changed.wait()
        return self._publication

    def count_in(self, block_bytes: int) -> None:
        """See Source."""
        self._asked_block_bytes = block_bytes

    async def read_into(self, version: VersionId, span: Span, buffer: memoryview) -> BlockDigest:
        """Fill ``buffer`` with the span; the digest of the whole block, as remembered or as just read.

        Raises StaleVersion, SourceUnavailable, SourceRefused (no such span), NoBuffer. Cancellation waits for the
        thread that fills the buffer.
        """
        assert len(buffer) == span.length_bytes
        if self._asked_block_bytes != self._block_bytes:
            raise StaleVersion(
                f"{self._path}: its blocks have {self._block_bytes} bytes, those asked for {self._asked_block_bytes}"
            )
        try:
            digest = await self._read_span(version, span, buffer)
        except TierfsError:
            self._statistics.failed_requests += 1
            raise
        self._count(span.length_bytes)
        return digest

    # --- for the server ---

    @asynccontextmanager
    async def open_block(self, version: VersionId, block: int) -> AsyncIterator[BlockReading]:
        """One block, with its digest, until the context ends; the file was that version just before.

        Raises StaleVersion, SourceUnavailable, SourceRefused (no such block), NoBuffer.
        """
        async with AsyncExitStack() as held:
            try:
                reading = await self._begin_reading(held, version, block)
            except TierfsError:
                self._statistics.failed_requests += 1
                raise
            self._count(reading.length_bytes)
            yield reading

    # --- reading ---

    async def _begin_reading(self, held: AsyncExitStack, version: VersionId, block: int) -> BlockReading:
        known, length = self._find(version, block)
        fd = await held.enter_async_context(self._files.use(version, known.facts, self._device))
        digest = known.digests.get(block)
        if digest is not None and await self._in_thread(check_unchanged, fd, known.facts):
            return BlockReading(digest, length, fd=fd, offset_bytes=block * self._block_bytes)
        view = await held.enter_async_context(self._buffers.use(length))
        digest = await self._read_block(version, known, fd, block, view)
        return BlockReading(digest, length, data=view)

    async def _read_span(self, version: VersionId, span: Span, buffer: memoryview) -> BlockDigest:
        known, length = self._find(version, span.block)
        if span.start_bytes < 0 or span.length_bytes < 0 or span.start_bytes + span.length_bytes > length:
            raise SourceRefused(f"block {span.block} of {known.facts.path!r} has no such span: {span}")
        async with self._files.use(version, known.facts, self._device) as fd:
            if span.length_bytes == length:
                return await self._read_block(version, known, fd, span.block, buffer)
            digest = known.digests.get(span.block)
            offset = span.block * self._block_bytes + span.start_bytes
            if digest is not None and await self._in_thread(read_piece, fd, known.facts, offset, buffer):
                return digest
            async with self._buffers.use(length) as whole:
                digest = await self._read_block(version, known, fd, span.block, whole)
                buffer[:] = whole[span.start_bytes : span.start_bytes + span.length_bytes]
                return digest

    async def _read_block(
        self, version: VersionId, known: Version, fd: int, block: int, view: memoryview
    ) -> BlockDigest:
        digest, lasting = await self._in_thread(
            read_block, fd, known.facts, block * self._block_bytes, view, known.digests.get(block)
        )
        if lasting:
            self._learn(version, block, digest)
        return digest

    async def _in_thread(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Not abandoned on cancellation: the thread writes to the caller's buffer, or uses its descriptor."""
        return await trio.to_thread.run_sync(call, *arguments, limiter=self._read_limiter)

    def _find(self, version: VersionId, block: int) -> tuple[Version, int]:
        """The version, and the length of that block of it."""
        if self._publication is None:
            raise SourceUnavailable(f"export {self._name!r} has not been scanned yet: {self._statistics.state}")
        known = self._versions.get(version)
        if known is None:
            raise StaleVersion(f"export {self._name!r} no longer has version {version.hex()}")
        size = known.facts.size_bytes
        if not 0 <= block < block_count(size, self._block_bytes):
            raise SourceRefused(f"{known.facts.path!r} has no block {block}")
        return known, block_length(size, self._block_bytes, block)

    def _count(self, length_bytes: int) -> None:
        self._statistics.fetched_blocks += 1
        self._statistics.fetched_bytes += length_bytes

    # --- scanning ---

    async def _scan_loop(self) -> None:
        while True:
            wait_s = self._rescan_s
            try:
                scan, device, took_s = await self._scan()
                await self._consider(scan, device)
            except SourceUnavailable as error:
                self._set_state("down", str(error))
            else:
                wait_s = max(self._rescan_s, 10 * took_s)
                if scan.settles_at_ns is not None:
                    settles_s = (scan.settles_at_ns - time.time_ns()) * 1e-9
                    wait_s = min(wait_s, max(settles_s, took_s, 0.01))
            await trio.sleep(wait_s)

    async def _scan(self) -> tuple[Scan, int, float]:
        """A scan, the device of the root, and how long it took. Raises SourceUnavailable."""
        stop = threading.Event()

        def checkpoint() -> None:
            if stop.is_set():
                raise SourceUnavailable("the scan was stopped")

        def body() -> tuple[Scan, int, float]:
            began_s = time.monotonic()
            try:
                root_fd = open_root(self._path)
            except OSError as error:
                raise SourceUnavailable(f"{self._path} cannot be opened: {error.strerror}") from error
            try:
                device = os.fstat(root_fd).st_dev
                scan = scan_tree(root_fd, export=self._name, settle_s=self._settle_s, checkpoint=checkpoint)
            finally:
                os.close(root_fd)
            return scan, device, time.monotonic() - began_s

        try:
            # Abandoned on cancellation: it touches nothing of ours, and a file server may hang for hours.
            return await trio.to_thread.run_sync(body, abandon_on_cancel=True, limiter=self._scan_limiter)
        finally:
            stop.set()

    async def _consider(self, scan: Scan, device: int) -> None:
        """Publish what was scanned, if it is sound and new. Raises SourceUnavailable if the directory is not there."""
        if not scan.steady:
            if self._statistics.reason != _RESTLESS:
                log.info("scan_unsteady url=%s reason=%s", self._statistics.url, _RESTLESS)
            self._set_state("connecting" if self._publication is None else "connected", _RESTLESS)
            return
        if self._publication is not None and device != self._device and len(scan.entries) == 1:
            raise SourceUnavailable(f"{self._path} is empty and on another device: is its file system mounted?")
        self._log_skipped(scan)
        tree = await trio.to_thread.run_sync(self._tree_digest, scan)
        if self._publication is None or tree != self._tree:
            await self._adopt(scan, device, tree)
        if device != self._device:  # mounted again, with the same tree
            self._device = device
            self._digester.begin(device)
        self.scans += 1
        self._set_state("connected", "")

    def _tree_digest(self, scan: Scan) -> bytes:
        return schema.catalog_digest(schema.encode(Catalog(self._name, 0, self._block_bytes, scan.entries)))

    async def _adopt(self, scan: Scan, device: int, tree: bytes) -> None:
        """Make the scan the new generation."""
        unknown = self._versions.unknown(scan.files)
        stored: dict[bytes, bytes] = await self._with_store(
            lambda store: store.lookup([facts for facts in unknown.values() if facts.size_bytes], self._block_bytes), {}
        )
        new = await trio.to_thread.run_sync(new_versions, unknown, stored, self._block_bytes)
        at_least = 1 if self._publication is None else self._publication.catalog.generation + 1
        generation = await self._with_store(lambda store: store.generation(tree, at_least=at_least), 0)
        if not generation:
            # Nothing remembers earlier lives: seconds run ahead of any count, so that no generation is told twice.
            generation = max(at_least, int(time.time()))

        # From here to the publication no checkpoint: readers see the old generation or the new one.
        self._device = device
        self._tree = tree
        self._versions.adopt(scan.files, new, generation)
        self._publish(Catalog(self._name, generation, self._block_bytes, scan.entries))
        self._digester.begin(device)

        await self._with_store(
            lambda store: store.prune({facts.path for facts in scan.files.values()}, now_s=time.time()), 0
        )

    def _publish(self, catalog: Catalog) -> None:
        revision = self._publication.revision + 1 if self._publication is not None else 1
        self._publication = Publication(catalog, dict(self._versions.contents), revision)
        self._changed.set()
        self._changed = trio.Event()

    async def _publish_loop(self) -> None:
        """Publish content ids as they become known: in batches, for every publication copies them all."""
        while True:
            await self._contents_grew.wait()
            self._contents_grew = trio.Event()
            began_s = trio.current_time()
            if self._publication is not None and len(self._versions.contents) != len(self._publication.contents):
                self._publish(self._publication.catalog)
            await trio.sleep(max(_PUBLISH_INTERVAL_S, 20 * (trio.current_time() - began_s)))

    def _set_state(self, state: str, reason: str) -> None:
        statistics = self._statistics
        if (statistics.state, statistics.reason) == (state, reason):
            return
        if statistics.state != state:
            statistics.since_s = time.time()
            level = logging.WARNING if state == "down" else logging.INFO
            log.log(level, "source_state url=%s state=%s reason=%s", statistics.url, state, reason or "-")
        statistics.state, statistics.reason = state, reason

    def _log_skipped(self, scan: Scan) -> None:
        """Each unreadable path once; the rest as counts, when they change."""
        fresh = scan.unreadable.keys() - self._logged
        for path in sorted(fresh)[: max(0, _LOGGED_PATHS - len(self._logged))]:
            log.warning("scan_unreadable export=%s path=%r reason=%s", self._name, path, scan.unreadable[path])
            self._logged.add(path)
        if scan.skipped != self._skipped:
            self._skipped = scan.skipped
            log.info("scan_skipped export=%s %s", self._name, scan.skipped)

    def _learn(self, version: VersionId, block: int, digest: BlockDigest) -> None:
        if self._versions.learn(version, block, digest):
            self._contents_grew.set()

    # --- keeping house ---

    async def _housekeeping_loop(self) -> None:
        while True:
            await trio.sleep(_HOUSEKEEPING_INTERVAL_S)
            await self._files.close_idle()
            self._digester.retry()

    async def _store_loop(self) -> None:
        while True:
            await trio.sleep(_FLUSH_INTERVAL_S)
            await self._flush()

    async def _flush(self, *, unfinished: bool = False) -> None:
        rows = self._versions.take_to_store(unfinished=unfinished)
        if rows:
            await self._with_store(lambda store: store.remember(rows, self._block_bytes), None)

    async def _with_store(self, call: Callable[[DigestStore], _T], default: _T) -> _T:
        """Call the store in its thread; ``default`` where there is none, or where it does not work (logged)."""
        path = self._store_path
        if path is None:
            return default

        def body() -> _T:
            if self._store is None:
                self._store = DigestStore(path)
            return call(self._store)

        try:
            result = await trio.to_thread.run_sync(body, limiter=self._store_limiter)
        except (OSError, sqlite3.Error) as error:
            trouble = str(error)
            result = default
        else:
            trouble = ""
        if trouble and trouble != self._store_trouble:
            log.warning("digest_store_failed path=%s error=%s (digests are not remembered)", path, trouble)
        self._store_trouble = trouble
        return result

"""A source in memory that can be made slow, absent, wrong or stale. Passes the source contract."""

from collections.abc import Mapping

import trio

from tierfs.blocks.errors import NotFound, SourceUnavailable, StaleVersion
from tierfs.blocks.ids import BlockDigest, ContentId, VersionId, digest_block, version_id
from tierfs.blocks.spans import Span
from tierfs.catalog.schema import Catalog, Entry, Kind, Publication
from tierfs.tiers.interface import SourceStatistics


def catalog_of(files: Mapping[bytes, bytes], *, block_bytes: int, generation: int = 1) -> Catalog:
    """A catalog of files by path; a version is hashed from path and bytes."""
    entries = [Entry(0, b"", Kind.DIRECTORY, 0o755, 1)]
    directories = {b"": 0}

    def directory(path: bytes) -> int:
        if path not in directories:
            above, _, name = path.rpartition(b"/")
            parent = directory(above)
            directories[path] = len(entries)
            entries.append(Entry(parent, name, Kind.DIRECTORY, 0o755, 1))
        return directories[path]

    for path, data in sorted(files.items()):
        above, _, name = path.rpartition(b"/")
        parent = directory(above)
        entries.append(Entry(parent, name, Kind.FILE, 0o644, 1, size_bytes=len(data), version=version_of(path, data)))
    return Catalog("memory", generation, block_bytes, entries)


def version_of(path: bytes, data: bytes) -> VersionId:
    """The version id that MemorySource gives a file."""
    stamp = int.from_bytes(digest_block(data)[:7], "little")
    return version_id(export="memory", path=path, inode=1, size_bytes=len(data), mtime_ns=stamp, ctime_ns=0)


class MemorySource:
    """Files by path. The switches take effect with the next request."""

    def __init__(self, files: Mapping[bytes, bytes], *, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.unavailable = False
        self.corrupt_next = 0  # so many answers get one flipped bit
        self.gate: trio.Event | None = None  # requests wait for it
        self.requests: list[tuple[VersionId, int]] = []
        self._changed = trio.Event()
        self._versions: dict[VersionId, bytes] = {}
        self._publication = self._publish(files, {}, 1)

    def publish(self, files: Mapping[bytes, bytes], contents: Mapping[VersionId, ContentId] | None = None) -> None:
        """Another generation; versions that are not in it become stale."""
        revision = self._publication.revision + 1
        self._publication = self._publish(files, contents or {}, revision)
        self._changed.set()
        self._changed = trio.Event()

    def _publish(
        self, files: Mapping[bytes, bytes], contents: Mapping[VersionId, ContentId], revision: int
    ) -> Publication:
        self._versions = {version_of(path, data): bytes(data) for path, data in files.items()}
        catalog = catalog_of(files, block_bytes=self.block_bytes, generation=revision)
        return Publication(catalog, contents, revision)

    def statistics(self) -> SourceStatistics:
        return SourceStatistics("memory:", state="down" if self.unavailable else "connected", transport="memory")

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def publication(self) -> Publication:
        await trio.lowlevel.checkpoint()
        return self._publication

    async def wait_changed(self, revision: int) -> Publication:
        while self._publication.revision == revision:
            await self._changed.wait()
        return self._publication

    def count_in(self, block_bytes: int) -> None:
        assert block_bytes == self.block_bytes

    async def read_into(self, version: VersionId, span: Span, buffer: memoryview) -> BlockDigest:
        self.requests.append((version, span.block))
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        if self.unavailable:
            raise SourceUnavailable("switched off")
        data = self._versions.get(version)
        if data is None:
            raise StaleVersion("not in this generation")
        start = span.block * self.block_bytes + span.start_bytes
        piece = data[start : start + span.length_bytes]
        if len(piece) != span.length_bytes or len(buffer) != span.length_bytes:
            raise NotFound("no such span")
        buffer[:] = piece
        digest = digest_block(piece)
        if self.corrupt_next:
            self.corrupt_next -= 1
            buffer[0] ^= 1
        return digest

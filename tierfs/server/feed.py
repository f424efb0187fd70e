"""What an export publishes, in the form its watchers get it: an encoded catalog and a growing log of content ids.

One feed per export, run by the server, read by the sessions. The log has each content id once, in the order in which
this server learned them, so that "I know so many" says exactly what a client lacks. It starts anew with a new catalog.
"""

import logging

import trio

from tierfs.blocks.errors import StaleVersion, TierfsError
from tierfs.blocks.ids import VersionId
from tierfs.catalog.schema import Catalog, Kind, Publication, catalog_digest, encode
from tierfs.server.exports import Exported
from tierfs.server.limits import ExportStatistics
from tierfs.wire.messages import CONTENT_PAIR_BYTES, CONTENTS_LIMIT_BYTES, Changed, Watch

log = logging.getLogger(__name__)

_COALESCE_S = 0.2  # content ids arrive one file at a time; comparing with what is known costs time per content
_RETRY_S = 1.0
_KEPT_CATALOGS = 2  # the newest, and the one that clients may be in the middle of


class ExportFeed:
    """The newest publication of one export, encoded."""

    def __init__(self, name: str, source: Exported, *, boot: bytes) -> None:
        self.name = name
        self.source = source
        self.block_bytes: int | None = None  # None until the first publication
        self.statistics = ExportStatistics()
        self._boot = boot
        self._encoded: dict[bytes, bytes] = {}  # by digest, oldest first
        self._digest = b""
        self._generation = 0
        self._catalog: Catalog | None = None
        self._known: set[VersionId] = set()
        self._contents = bytearray()
        self._changed = trio.Event()
        self._limiter = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Follow the source for ever."""
        publication: Publication | None = None
        failing = False
        while True:
            try:
                if publication is None:
                    publication = await self.source.publication()
                else:
                    publication = await self.source.wait_changed(publication.revision)
            except TierfsError as error:
                if not failing:
                    log.warning("export_unreadable export=%r error=%s", self.name, error)
                failing = True
                await trio.sleep(_RETRY_S)
                continue
            failing = False
            await self._take(publication)
            await trio.sleep(_COALESCE_S)

    async def wait_news(self, watch: Watch) -> tuple[Changed, memoryview]:
        """The answer to a Watch, and its data. Waits until there is one; cancellation leaves nothing."""
        while True:
            if self._digest:
                known = watch.boot == self._boot and watch.catalog_digest == self._digest
                start = watch.known_contents * CONTENT_PAIR_BYTES if known else 0
                if not known or start < len(self._contents):
                    # A copy: the log must stay free to grow.
                    data = memoryview(bytes(self._contents[start : start + CONTENTS_LIMIT_BYTES]))
                    return self._news(start // CONTENT_PAIR_BYTES), data
            await self._changed.wait()

    def catalog_part(self, digest: bytes, offset_bytes: int, length_bytes: int) -> memoryview:
        """Bytes of an encoded catalog. Raises StaleVersion when it is not kept any more, or has no such part."""
        encoded = self._encoded.get(digest)
        if encoded is None or offset_bytes + length_bytes > len(encoded):
            raise StaleVersion(f"export {self.name!r} has another catalog by now: watch again")
        return memoryview(encoded)[offset_bytes : offset_bytes + length_bytes]

    def _news(self, first_content: int) -> Changed:
        return Changed(
            boot=self._boot,
            catalog_digest=self._digest,
            catalog_bytes=len(self._encoded[self._digest]),
            generation=self._generation,
            first_content=first_content,
        )

    async def _take(self, publication: Publication) -> None:
        news = False
        if publication.catalog is not self._catalog:
            encoded = await trio.to_thread.run_sync(encode, publication.catalog, limiter=self._limiter)
            digest = await trio.to_thread.run_sync(catalog_digest, encoded, limiter=self._limiter)
            size_bytes = await trio.to_thread.run_sync(_size_of, publication.catalog, limiter=self._limiter)
            # No checkpoint from here on: digest, log and catalog change together.
            self._catalog = publication.catalog
            if digest != self._digest:
                self._encoded.pop(digest, None)
                self._encoded[digest] = encoded
                while len(self._encoded) > _KEPT_CATALOGS:
                    del self._encoded[next(iter(self._encoded))]
                self._digest = digest
                self._generation = publication.catalog.generation
                self.block_bytes = publication.catalog.block_bytes
                self._known = set()
                self._contents = bytearray()
                news = True
                self.statistics.publications += 1
                self.statistics.generation = self._generation
                self.statistics.entries = len(publication.catalog.entries)
                self.statistics.size_bytes = size_bytes
                self.statistics.catalog_bytes = len(encoded)
                log.info(
                    "export_published export=%r generation=%d entries=%d catalog_bytes=%d",
                    self.name, self._generation, len(publication.catalog.entries), len(encoded),
                )  # fmt: skip
        for version in publication.contents.keys() - self._known:
            self._known.add(version)
            self._contents += version + publication.contents[version]
            news = True
        if news:
            self._changed.set()
            self._changed = trio.Event()


def _size_of(catalog: Catalog) -> int:
    """Each file once, however many names it has."""
    return sum({entry.version: entry.size_bytes for entry in catalog.entries if entry.kind is Kind.FILE}.values())

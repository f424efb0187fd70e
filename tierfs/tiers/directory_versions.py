"""The versions of an exported directory: those of the last generations, and what is known of their digests.

Called by the directory source and its digester, on the trio thread only; nothing here waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tierfs.blocks.ids import ID_BYTES, BlockDigest, ContentId, VersionId, content_id
from tierfs.blocks.spans import block_count, block_length
from tierfs.catalog.scan import FileFacts

GENERATIONS_REMEMBERED = 16
_STORE_EVERY_BLOCKS = 256  # of a large file, so that a server that was killed need not begin it anew


class VersionDigests:
    """The block digests of one version that are known so far, in any order."""

    __slots__ = ("_digests", "_known", "_missing")

    def __init__(self, blocks: int, prefix: bytes = b"") -> None:
        """``prefix`` holds the digests of the first blocks, concatenated."""
        known = len(prefix) // ID_BYTES
        self._missing = blocks - known
        # Complete is the common case and needs no more than the digests themselves.
        self._digests = bytearray(prefix + bytes(self._missing * ID_BYTES)) if self._missing else prefix
        self._known = bytearray(b"\1" * known + bytes(self._missing)) if self._missing else bytearray()

    @property
    def complete(self) -> bool:
        """Whether all are known."""
        return self._missing == 0

    def get(self, block: int) -> BlockDigest | None:
        """The digest of that block, or None."""
        if self._missing and not self._known[block]:
            return None
        return BlockDigest(bytes(self._digests[block * ID_BYTES : (block + 1) * ID_BYTES]))

    def put(self, block: int, digest: BlockDigest) -> bool:
        """Remember a digest; False where one was known already (which then stays)."""
        if not self._missing or self._known[block]:
            return False
        assert isinstance(self._digests, bytearray)
        self._digests[block * ID_BYTES : (block + 1) * ID_BYTES] = digest
        self._known[block] = 1
        self._missing -= 1
        if not self._missing:
            self._digests = bytes(self._digests)
            self._known = bytearray()
        return True

    def missing(self) -> list[int]:
        """The blocks whose digest is not known, in order."""
        return [block for block, known in enumerate(self._known) if not known] if self._missing else []

    def prefix(self) -> bytes:
        """The digests of the first blocks, up to the first one that is not known."""
        if not self._missing:
            return bytes(self._digests)
        return bytes(self._digests[: self._known.find(0) * ID_BYTES])

    def known_bytes(self, size_bytes: int, block_bytes: int) -> int:
        """How many bytes of the file the known digests cover."""
        return size_bytes - sum(block_length(size_bytes, block_bytes, block) for block in self.missing())

    def content_id(self, size_bytes: int) -> ContentId:
        """The content id; only of a complete one."""
        assert self.complete
        return content_id(self._digests, size_bytes)


@dataclass(slots=True)
class Version:
    """What is remembered of one version."""

    facts: FileFacts
    digests: VersionDigests
    generation: int  # the last one that had it
    stored_blocks: int  # how many digests were given to the store
    content: ContentId | None  # once all digests are known


def new_versions(
    files: Mapping[VersionId, FileFacts], stored: Mapping[bytes, bytes], block_bytes: int
) -> dict[VersionId, Version]:
    """What there is to remember of files never seen before; pure, and for many files slow enough for a thread.

    ``stored`` has remembered digests by path, concatenated from block 0 on.
    """
    versions = {}
    for identity, facts in files.items():
        prefix = stored.get(facts.path, b"")
        digests = VersionDigests(block_count(facts.size_bytes, block_bytes), prefix)
        content = digests.content_id(facts.size_bytes) if digests.complete else None
        versions[identity] = Version(facts, digests, 0, len(prefix) // ID_BYTES, content)
    return versions


class Versions:
    """All versions that can still be asked for, and the content ids of the current generation's."""

    def __init__(self, block_bytes: int) -> None:
        self.current: Mapping[VersionId, FileFacts] = {}
        self.contents: dict[VersionId, ContentId] = {}  # of the current ones; a new dict for each generation
        self.digested_bytes = 0  # of the current ones
        self.total_bytes = 0
        self._block_bytes = block_bytes
        self._all: dict[VersionId, Version] = {}
        self._to_store: dict[VersionId, Version] = {}

    def get(self, version: VersionId) -> Version | None:
        """The version, or None if it was never seen or is forgotten."""
        return self._all.get(version)

    def unknown(self, files: Mapping[VersionId, FileFacts]) -> dict[VersionId, FileFacts]:
        """Those of these files that are not remembered."""
        return {identity: facts for identity, facts in files.items() if identity not in self._all}

    def adopt(self, files: Mapping[VersionId, FileFacts], new: Mapping[VersionId, Version], generation: int) -> None:
        """Make these files the current generation; ``new`` has the versions of the ``unknown`` ones."""
        self._all.update(new)
        self.current = files
        self.contents = {}
        self.digested_bytes = self.total_bytes = 0
        for identity, facts in files.items():
            version = self._all[identity]
            version.generation = generation
            self.total_bytes += facts.size_bytes
            if version.content is not None:
                self.contents[identity] = version.content
                self.digested_bytes += facts.size_bytes
            else:
                self.digested_bytes += version.digests.known_bytes(facts.size_bytes, self._block_bytes)
        oldest = generation - GENERATIONS_REMEMBERED
        for identity in [identity for identity, version in self._all.items() if version.generation <= oldest]:
            del self._all[identity]

    def learn(self, identity: VersionId, block: int, digest: BlockDigest) -> bool:
        """A digest became known, by digesting or by serving. True if that gave a current version its content id."""
        version = self._all.get(identity)
        if version is None or not version.digests.put(block, digest):
            return False
        size = version.facts.size_bytes
        current = identity in self.current
        if current:
            self.digested_bytes += block_length(size, self._block_bytes, block)
        if not version.digests.complete:
            if block - version.stored_blocks >= _STORE_EVERY_BLOCKS:
                version.stored_blocks = block
                self._to_store[identity] = version
            return False
        self._to_store[identity] = version
        version.content = version.digests.content_id(size)
        if current:
            self.contents[identity] = version.content
        return current

    def take_to_store(self, *, unfinished: bool = False) -> list[tuple[FileFacts, bytes]]:
        """What became known since the last call and should outlive the process; with ``unfinished`` every bit of it."""
        if unfinished:
            for identity in self.current:
                version = self._all[identity]
                if not version.digests.complete and version.digests.prefix():
                    self._to_store[identity] = version
        taken, self._to_store = self._to_store, {}
        return [(version.facts, version.digests.prefix()) for version in taken.values()]

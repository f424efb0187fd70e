"""The index of a local tier: which object is where and which of its blocks are resident, in memory.

Called by local.py and its parts, on the trio thread only; threads never see it. It is the truth of this run; the
database of each device (residency.py) is what the next run starts from.

    block of an entry:   absent ──offer──► pending ──durable──► resident ──read_block──► resident, verified
                            ▲                 │ failed              │ mismatch, I/O error, hole     │
                            └─────────────────┴─────────────────────┴────────── stamp changed: only ┘ resident

The *stamp* of an object is its file's mtime and ctime after our own last write. Another stamp means that somebody else
wrote there: then nothing counts as verified until its digest was compared again, in this run and in the next one too.
"""

from collections.abc import Callable, Iterator, Set
from typing import TYPE_CHECKING

from tierfs.blocks.ids import ID_BYTES, BlockDigest, ObjectKey
from tierfs.blocks.spans import block_count, block_length

if TYPE_CHECKING:
    from tierfs.tiers.device import Device


class Entry:
    """One object. ``name`` names its file for ever; ``key`` is what it is known as now (its content id, once known)."""

    __slots__ = (
        "aliases", "allocated_bytes", "batches", "block_bytes", "device", "digests", "found_good", "gone", "handed_out",
        "handed_out_saved", "key", "last_use_s", "model",
        "model_bytes", "name", "path", "pending", "removing", "resident", "resident_blocks", "resident_bytes",
        "size_bytes", "stamp", "stamp_due", "stamp_serial", "unwritable", "verified", "writing",
    )  # fmt: skip

    def __init__(
        self, *, name: ObjectKey, key: ObjectKey, size_bytes: int, block_bytes: int, path: bytes, model: bytes,
        model_bytes: int, device: "Device", last_use_s: float,
    ) -> None:  # fmt: skip
        count = block_count(size_bytes, block_bytes)
        self.name = name
        self.key = key
        self.size_bytes = size_bytes
        self.block_bytes = block_bytes
        self.path = path
        self.model = model
        self.model_bytes = model_bytes
        self.device = device
        self.last_use_s = last_use_s
        self.aliases: set[ObjectKey] = set()
        self.allocated_bytes = 0
        self.resident = bytearray(count)
        self.verified = bytearray(count)
        self.digests = bytearray(count * ID_BYTES)
        self.resident_blocks = 0
        self.resident_bytes = 0
        self.pending: set[int] = set()
        self.unwritable: set[int] = set()  # blocks that lie on bad memory: they keep it from others
        self.writing = 0  # batches that write to the file now
        self.batches = 0  # that have begun to in this run
        self.stamp: tuple[int, int] | None = None
        self.stamp_due = False  # written to since the stamp was taken
        self.stamp_serial = 0  # grows whenever the verified flags were lost
        self.handed_out = False  # somebody may map the file: it is never written to again, and goes as a whole
        self.handed_out_saved = False  # and the next run will know
        self.found_good: list[int] = []  # see failed_pages.look
        self.removing = False  # out of the index; its row, file and space follow
        self.gone = False

    def length_bytes(self, block: int) -> int:
        """The length of one block."""
        return block_length(self.size_bytes, self.block_bytes, block)

    def has(self, block: int) -> bool:
        """Whether the block is resident; False for one beyond the end, or of an object that leaves."""
        return not self.removing and 0 <= block < len(self.resident) and self.resident[block] == 1

    def digest(self, block: int) -> BlockDigest:
        """The digest of a resident block."""
        return BlockDigest(bytes(self.digests[block * ID_BYTES : (block + 1) * ID_BYTES]))

    def fill(self, block: int, digest: BlockDigest) -> None:
        """The block is durable on the device."""
        self.digests[block * ID_BYTES : (block + 1) * ID_BYTES] = digest
        if not self.resident[block]:
            self.resident[block] = 1
            self.resident_blocks += 1
            self.resident_bytes += self.length_bytes(block)

    def drop(self, block: int) -> None:
        """The block is a miss from now on."""
        if self.resident[block]:
            self.resident[block] = self.verified[block] = 0
            self.resident_blocks -= 1
            self.resident_bytes -= self.length_bytes(block)

    def compare(self, stamp: tuple[int, int]) -> bool:
        """Whether the file is as we left it. If not, every block must be compared with its digest again."""
        known, self.stamp = self.stamp, stamp
        if known is None or known == stamp:
            return True
        self.verified = bytearray(len(self.verified))
        self.stamp_serial += 1
        self.device.unverify(self.name)
        return False

    def blocks(self) -> list[tuple[int, BlockDigest]]:
        """The resident blocks."""
        return [(block, self.digest(block)) for block, there in enumerate(self.resident) if there]


class Index:
    """Entries by key, where a version id and the content id it turned out to be are one key."""

    def __init__(self) -> None:
        self._entries: dict[ObjectKey, Entry] = {}
        self._content: dict[ObjectKey, ObjectKey] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def canonical(self, key: ObjectKey) -> ObjectKey:
        """The content id behind a key, if it is known; else the key."""
        return self._content.get(key, key)

    def get(self, key: ObjectKey) -> Entry | None:
        """The entry of either kind of key."""
        return self._entries.get(self._content.get(key, key))

    def add(self, entry: Entry) -> Entry | None:
        """Add an entry; if its content is here already, the fuller one stays and the other is returned."""
        # The content may have become known while the entry was not here (a device that was lost, an earlier run).
        entry.key = self.canonical(entry.key)
        for alias in (entry.name, *entry.aliases):
            if alias != entry.key:
                self._content[alias] = entry.key
        known = self._entries.get(entry.key)
        if known is not None and known.resident_blocks + len(known.pending) >= entry.resident_blocks:
            known.aliases |= entry.aliases | {entry.name}
            return entry
        self._entries[entry.key] = entry
        return known

    def discard(self, entry: Entry) -> None:
        """The entry is not here any more. What its keys mean stays known."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]

    def alias(self, version: ObjectKey, content: ObjectKey) -> tuple[Entry | None, Entry | None]:
        """From now on both keys mean one content. Returns the entry that stays and the one that must go, if any."""
        if version == content or self._content.get(version) == content:
            return None, None
        entry = self._entries.pop(version, None)
        self._content[version] = content
        loser = None
        if entry is not None:
            entry.key = content
            entry.aliases.add(version)
            loser = self.add(entry)
        stays = self._entries.get(content)
        if stays is not None:
            stays.aliases.add(version)
        return stays, loser

    def retain(self, versions: Set[bytes], *, pinned: Callable[[ObjectKey], bool]) -> None:
        """Forget what all other versions mean, since each publication brings new ones; not of pinned content, which
        is unpinned by the key it was pinned by.
        """
        self._content = {
            version: content for version, content in self._content.items() if version in versions or pinned(content)
        }
        for entry in self._entries.values():
            entry.aliases = {alias for alias in entry.aliases if alias in self._content}

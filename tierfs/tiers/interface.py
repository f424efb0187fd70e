"""The two kinds of places blocks come from, and what they share.

A *source* is what the cold tier reads from: a remote export or a directory. A *local tier* (hot, warm) holds objects.
The block cache is their only caller on the daemon; the server is the other caller of a directory source.
"""

from collections.abc import Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import trio

from tierfs.blocks.ids import BlockDigest, ObjectKey, VersionId
from tierfs.blocks.spans import Span
from tierfs.catalog.schema import Publication


@dataclass
class SourceStatistics:
    """What a source tells `status`. ``state`` is one word: connecting, connected, down, closed."""

    url: str
    state: str = "connecting"
    reason: str = ""  # why it is not connected, for a person
    since_s: float = 0.0  # time.time() of the last change of state
    transport: str = ""  # tcp, rdma, file: how blocks come now
    transport_reason: str = ""  # why not by RDMA, for a person
    device: str = ""  # the RDMA devices in use
    port: str = ""  # and their ports, in the same order
    rdma_blocks: int = 0  # of fetched_blocks, those that came by RDMA
    rdma_bytes: int = 0
    rdma_failures: int = 0  # blocks that had to be fetched another way
    rdma_failed_reads: int = 0  # READs that were under way when their queue pair failed
    connections: int = 0
    fetched_bytes: int = 0
    fetched_blocks: int = 0
    failed_requests: int = 0
    digested_bytes: int = 0
    digest_total_bytes: int = 0


class Source(Protocol):
    """What the cold tier reads from."""

    def statistics(self) -> SourceStatistics:
        """Counters and state; never waits."""

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Everything that lives as long as the source (connections, scanning). Cancel to close.

        Calls ``task_status.started()`` at once, not when the source is reached.
        """

    async def publication(self) -> Publication:
        """The newest publication; waits for the first one. The caller sets the deadline."""

    async def wait_changed(self, revision: int) -> Publication:
        """Wait until the publication has another revision than this one, and return it. Cancellation leaves nothing."""

    def count_in(self, block_bytes: int) -> None:
        """Spans are counted in blocks of this size from now on. Where the source's differ, reads raise StaleVersion."""

    async def read_into(self, version: VersionId, span: Span, buffer: memoryview) -> BlockDigest:
        """Fill ``buffer`` (exactly ``span.length_bytes`` long) with that span, and return the digest the source claims.

        The block cache asks for whole blocks and compares the digest. Raises StaleVersion, NotFound, SourceUnavailable
        (try again), SourceRefused. After cancellation or an error no thread writes to the buffer any more: a
        connection whose answer was under way is drained elsewhere or closed.
        """


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What a local tier must know of the content it stores. ``model`` names the unit of placement (a path, bytes)."""

    key: ObjectKey
    size_bytes: int
    block_bytes: int
    path: bytes  # one path it has, for people
    model: bytes
    model_bytes: int = 0  # size of the whole model, 0 when not known


class Lease(Protocol):
    """A right to use one buffer until released. Release exactly once, on the trio thread."""

    @property
    def view(self) -> memoryview:
        """The bytes; page aligned, so that O_DIRECT may use them. Exactly as long as the block."""

    def release(self) -> None:
        """Give the buffer back; the view must not be touched afterwards."""


class Checked(Enum):
    """What a check of one block found."""

    GOOD = "good"
    BAD = "bad"  # not what its digest says, or unreadable: it is dropped, or its whole object where that is handed out
    GONE = "gone"  # not here any more, and nothing was wrong with it
    UNREAD = "unread"  # could not be read just now, through no fault of its own


class Offer(Enum):
    """What a tier did with a block it was offered."""

    ACCEPTED = "accepted"  # the tier owns the lease now and releases it when the bytes are written or dropped
    RESIDENT = "resident"  # had it already
    BYPASSED = "bypassed"  # placement: no room that may be taken
    FULL = "full"  # the write queue is full: the medium cannot keep up
    FAILED = "failed"  # the medium is out of service


@dataclass
class TierStatistics:
    """What a local tier tells `status`; units in the names."""

    name: str
    capacity_bytes: int
    high_bytes: int = 0  # an incoming block must make room above this: the most that can be pinned
    used_bytes: int = 0
    dying_bytes: int = 0  # part of used_bytes: evicted, but somebody may still map it
    hit_blocks: int = 0
    read_bytes: int = 0  # read through us, by whomever; a passthrough reader's are not seen
    written_blocks: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    corrupt_blocks: int = 0
    bypassed_blocks: int = 0
    skipped_blocks: int = 0  # write queue full
    failed_reads: int = 0
    media_errors: int = 0  # of these, found after a reader of a file that was handed out had met them
    failed_writes: int = 0
    queued_bytes: int = 0
    objects: int = 0
    state: str = "ok"  # ok, degraded, failed
    reason: str = ""
    kind: str = ""  # what the medium is: directory, tmpfs, dax
    medium: str = ""  # what that means, for people: pmem, tmpfs (volatile), directory
    residency: str = ""  # where it is kept: libpmemobj pool, sqlite, none
    residency_reason: str = ""  # why not in a pool, where the tier is mapped
    handed_out: int = 0  # opens that got a whole object to read without us
    kept_back: dict[str, int] = field(default_factory=dict)  # reason -> opens that got no object, all of it here
    devices: list[dict[str, object]] = field(default_factory=list)


class LentFile(Protocol):
    """A tier file that the channel holds a descriptor of. See fuse/channel.py."""

    @property
    def slot(self) -> int:
        """Its place in the channel's table."""

    @property
    def generation(self) -> int:
        """Tells it from what had that place before."""


class Lender(Protocol):
    """Who can read tier files on our behalf: the channel."""

    async def lend(self, fd: int, size_bytes: int) -> LentFile | None:
        """Give a read-only descriptor of a whole object; the caller closes its own afterwards.

        None where there is no room for it or the channel refuses it (logged). Cancellation: nothing stays lent.
        """

    def take_back(self, lent: LentFile) -> None:
        """The channel shall close it; never waits. Only when no part of it is under lease."""

    async def offer(self, inode: int, lent: LentFile) -> bool:
        """The OPEN of that inode that is about to be answered may read the file itself (passthrough).

        Whether it will, unless the kernel refuses: not beside an open through the daemon, or where there is none of it.
        """


class Hold(Protocol):
    """Keeps the bytes of one part where they are. Release exactly once, on the trio thread."""

    def release(self) -> None:
        """The bytes may go."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where some bytes of a reply lie: in a lent tier file, or (``lent`` None) in the buffer pool's memory file."""

    lent: LentFile | None
    offset_bytes: int
    length_bytes: int
    hold: Hold


class LocalTier(Protocol):
    """Hot or warm: objects of a bounded total size. The index lives on the trio thread; threads get fds and buffers."""

    @property
    def name(self) -> str:
        """hot or warm."""

    @property
    def mapped(self) -> bool:
        """Whether read_nowait answers from mapped memory, so that loading a block into a buffer first gains nothing."""

    def statistics(self) -> TierStatistics:
        """Counters and state; never waits."""

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Open the directories, load residency, run writers and the reclaimer. Started when reads may begin.

        On cancellation accepted blocks are dropped or finished within a bounded time, leases are released, and the
        clean-stop mark is written.
        """

    def resident(self, key: ObjectKey, block: int) -> bool:
        """Whether that block can be read from here. Never waits."""

    def resident_bytes(self, key: ObjectKey) -> int:
        """How many bytes of that content are here. Never waits."""

    def read_nowait(self, key: ObjectKey, span: Span) -> memoryview | None:
        """The span if it can be had without waiting (page cache, or mapped memory) from a block already verified.

        None: not here, not verified, or would wait. A view of a mapping is for an immediate reply only and must not be
        read by Python code.
        """

    async def read_soon(self, key: ObjectKey, span: Span) -> memoryview | None:
        """As read_nowait, but asks the medium for the span and looks a few times whether it has come; ordinary memory.

        Some tens of microseconds at most, and never a wait for the medium: None then, and read_span is next.
        """

    async def read_span(self, key: ObjectKey, span: Span) -> bytes | bytearray | memoryview | None:
        """The span read in a thread, from a block already verified; None: not here or not verified."""

    async def read_block(self, key: ObjectKey, block: int, buffer: memoryview) -> bool:
        """Fill ``buffer`` (exactly the block's length) and check it against its digest; False: not here (any more).

        A block that does not match, or cannot be read, is dropped from the tier, counted, and answered False.
        Cancellation: waits for the thread that fills the buffer (bounded by the medium), then raises.
        """

    async def check_block(self, key: ObjectKey, block: int, buffer: memoryview) -> Checked:
        """read_block for `verify`: not counted as a hit, and it says more."""

    def objects(self) -> list[tuple[ObjectFacts, frozenset[ObjectKey]]]:
        """Everything that is here, each with all the keys it is known by. Never waits."""

    def waiting(self, key: ObjectKey, event: trio.Event) -> AbstractContextManager[None]:
        """While inside, the event is set, too, when the medium of that content stops answering.

        It is no longer resident then, but a read of it that was under way keeps its thread, and its buffer, until the
        medium answers.
        """

    def digest(self, key: ObjectKey, block: int) -> BlockDigest | None:
        """The digest of a resident block, or None."""

    def offer(self, facts: ObjectFacts, block: int, digest: BlockDigest, lease: Lease) -> Offer:
        """Offer a verified block for write-behind; never waits. Only ACCEPTED takes the lease over."""

    def alias(self, version: ObjectKey, content: ObjectKey) -> None:
        """The content id of a version became known: from now on both keys mean the same object."""

    def retain(self, versions: Set[bytes]) -> None:
        """Nobody asks for another version any more: what the others turned out to be may be forgotten."""

    def touch(self, key: ObjectKey) -> None:
        """A file view of that content was opened (feeds placement)."""

    def pin(self, key: ObjectKey) -> None:
        """A file view is open: do not evict this object. Counted; see unpin."""

    def unpin(self, key: ObjectKey) -> None:
        """The counterpart of pin."""

    def keep(self, key: ObjectKey) -> None:
        """An operator has pinned it: as pin, and what is not pinned gives way for it, however hot. Counted."""

    def let_go(self, key: ObjectKey) -> None:
        """The counterpart of keep."""

    def locate_nowait(self, key: ObjectKey, span: Span) -> Part | None:
        """As locate, if the object is open and lent already; never waits."""

    async def locate(self, key: ObjectKey, span: Span) -> Part | None:
        """Where the span lies, from a block already verified; None: not here, not verified, or nobody to lend it to.

        The object stays open and in place until the hold is released. Cancellation leaves nothing.
        """

    async def whole(self, key: ObjectKey) -> LentFile | None:
        """The object as a file to be read without us, if all its blocks are resident and verified; else None.

        From then on it is never written to again: it is evicted whole, and its space counts until nobody maps it.
        """

    async def failed(self, lent: LentFile, offset_bytes: int, error_number: int) -> None:
        """Reading there failed on our behalf: the block is dropped, or the object where it was handed out.

        EINPROGRESS: it has not answered in time, and its device counts as stalled; nothing is dropped.
        """

    async def evict(self, key: ObjectKey) -> int:
        """Remove the whole object; the bytes freed."""

    async def flush(self) -> None:
        """Wait until everything accepted so far is durable and resident, or dropped."""

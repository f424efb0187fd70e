"""Digesting the files of an exported directory in the background, several at once.

Called by the directory source. ``digest_files`` blocks; its steps run in a thread, one at a time, and hand back what
they found. The Digester lives on the trio thread, decides what comes next and tells the source what became known.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from tierfs.blocks.errors import StaleVersion, TierfsError
from tierfs.blocks.ids import BlockDigest, VersionId
from tierfs.blocks.spans import block_length
from tierfs.catalog.scan import TICK_NS, FileFacts
from tierfs.tiers.directory_files import open_version, read_block
from tierfs.tiers.directory_versions import Versions

log = logging.getLogger(__name__)

# One step of work: long enough that going to the thread costs nothing, short enough that progress is seen.
_STEP_BYTES = 64 << 20
_STEP_FILES = 256
_RETRY_S = 60.0  # before a file that could not be digested is tried again
_LOGGED_PATHS = 10_000  # how many paths that failed are remembered as logged


@dataclass(frozen=True, slots=True)
class DigestJob:
    """Blocks of one file to digest."""

    version: VersionId
    facts: FileFacts
    blocks: Sequence[int]


@dataclass(slots=True)
class DigestStep:
    """What one step of ``digest_files`` found."""

    found: list[tuple[VersionId, int, BlockDigest]] = field(default_factory=list)
    finished: int = 0  # files of which no more will come
    failed: list[tuple[VersionId, TierfsError]] = field(default_factory=list)
    read_bytes: int = 0


def digest_files(
    root: Path, device: int, jobs: Sequence[DigestJob], block_bytes: int, buffer: memoryview, stop: threading.Event
) -> Generator[DigestStep, None, None]:
    """Digest these files through ``buffer`` (one block long), yielding after each piece of work.

    Every digest that is handed back was read between two looks at the file that found it just as scanned. A file that
    changes is given up with StaleVersion: the next scan finds what it is by then. ``stop`` ends it at the next block.
    """
    step = DigestStep()
    for job in jobs:
        try:
            for block, digest in _digest_file(root, device, job, block_bytes, buffer, stop):
                if digest is None:
                    return
                step.found.append((job.version, block, digest))
                step.read_bytes += block_length(job.facts.size_bytes, block_bytes, block)
                if step.read_bytes >= _STEP_BYTES:
                    yield step
                    step = DigestStep()
        except TierfsError as error:
            step.failed.append((job.version, error))
        step.finished += 1
        if step.finished >= _STEP_FILES:
            yield step
            step = DigestStep()
    yield step


def _digest_file(
    root: Path, device: int, job: DigestJob, block_bytes: int, buffer: memoryview, stop: threading.Event
) -> Iterator[tuple[int, BlockDigest | None]]:
    facts = job.facts
    fd = open_version(root, device, facts)
    try:
        young_ns = facts.ctime_ns + TICK_NS - time.time_ns()
        if 0 < young_ns <= 2 * TICK_NS:  # until then a change might leave no trace
            time.sleep(young_ns * 1e-9)
        for block in job.blocks:
            if stop.is_set():
                yield block, None
                return
            view = buffer[: block_length(facts.size_bytes, block_bytes, block)]
            digest, _ = read_block(fd, facts, block * block_bytes, view, None)
            yield block, digest
    finally:
        os.close(fd)
    os.close(open_version(root, device, facts))  # still the file of that name, or StaleVersion


class Digester:
    """The queue of files to digest, and the workers that do it. The queue is the current generation, no more."""

    def __init__(
        self,
        root: Path,
        *,
        versions: Versions,
        block_bytes: int,
        workers: int,
        learn: Callable[[VersionId, int, BlockDigest], None],
    ) -> None:
        """``learn`` is called for every digest, on the trio thread."""
        self.read_bytes = 0  # in this life
        self._root = root
        self._versions = versions
        self._block_bytes = block_bytes
        self._workers = workers
        self._learn = learn
        self._limiter = trio.CapacityLimiter(max(1, workers))
        self._device = 0
        self._pending: deque[VersionId] = deque()
        self._grew = trio.Event()  # replaced whenever the queue is filled
        self._working: set[VersionId] = set()
        self._retry_at_s: dict[VersionId, float] = {}
        self._logged: set[bytes] = set()

    def begin(self, device: int) -> None:
        """A generation was adopted: digest what it has. ``device`` is that of the root."""
        self._device = device
        self._retry_at_s.clear()
        contents = self._versions.contents
        self._fill(version for version in self._versions.current if version not in contents)

    def retry(self) -> None:
        """Queue again what failed a while ago. Call it every few seconds."""
        now_s = trio.current_time()
        due = [version for version, at_s in self._retry_at_s.items() if at_s <= now_s]
        if due:
            for version in due:
                del self._retry_at_s[version]
            self._fill([*self._pending, *due])

    async def run(self) -> None:
        """Work until cancelled. A thread that hangs in the directory is left behind then."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._workers):
                nursery.start_soon(self._work)

    def _fill(self, versions: Iterable[VersionId]) -> None:
        self._pending = deque(versions)
        self._grew.set()
        self._grew = trio.Event()

    def _take(self) -> list[DigestJob]:
        """The next files: many small ones, or a large one."""
        jobs: list[DigestJob] = []
        size_bytes = 0
        while self._pending and len(jobs) < _STEP_FILES and size_bytes < _STEP_BYTES:
            identity = self._pending[0]
            version = self._versions.get(identity)
            if version is None or identity not in self._versions.current or identity in self._working:
                self._pending.popleft()
                continue
            if jobs and size_bytes + version.facts.size_bytes > _STEP_BYTES:
                break
            self._pending.popleft()
            blocks = version.digests.missing()
            if blocks:
                jobs.append(DigestJob(identity, version.facts, blocks))
                size_bytes += version.facts.size_bytes
        return jobs

    async def _work(self) -> None:
        buffer = memoryview(bytearray(self._block_bytes))
        while True:
            jobs = self._take()
            if not jobs:
                await self._grew.wait()
                continue
            identities = [job.version for job in jobs]
            self._working.update(identities)
            stop = threading.Event()
            steps = digest_files(self._root, self._device, jobs, self._block_bytes, buffer, stop)
            try:
                while True:
                    # Abandoned on cancellation, for a file server may hang for hours; the buffer is the thread's then.
                    step = await trio.to_thread.run_sync(
                        next, steps, None, abandon_on_cancel=True, limiter=self._limiter
                    )
                    if step is None:
                        break
                    self._take_step(step)
            finally:
                self._working.difference_update(identities)
                stop.set()
                with suppress(ValueError):  # still running in its thread: it ends at the next block
                    steps.close()

    def _take_step(self, step: DigestStep) -> None:
        self.read_bytes += step.read_bytes
        for identity, block, digest in step.found:
            self._learn(identity, block, digest)
        for identity, error in step.failed:
            version = self._versions.get(identity)
            if version is None or identity not in self._versions.current:
                continue
            # A file that changed is usually found as a new version before the retry; then this one is dropped.
            self._retry_at_s[identity] = trio.current_time() + _RETRY_S
            path = version.facts.path
            if not isinstance(error, StaleVersion) and path not in self._logged and len(self._logged) < _LOGGED_PATHS:
                self._logged.add(path)
                log.warning("digest_failed root=%s path=%r reason=%s", self._root, path, error)

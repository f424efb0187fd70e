"""A real server shows what is in its export and nothing else, whatever somebody does to the tree while it opens it."""

import ctypes
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.integration.processes import Serve, descriptors
from tests.integration.serving import RawPeer, run, running
from tierfs.blocks.errors import SourceRefused, StaleVersion, TierfsError
from tierfs.blocks.ids import VersionId
from tierfs.blocks.spans import Span
from tierfs.catalog.schema import Kind, Publication
from tierfs.tiers.remote import RemoteSource
from tierfs.wire import messages as m

FILES = 300
LENGTH = 4096
INSIDE, SECRET = b"i" * LENGTH, b"SECRET!!" * (LENGTH // 8)
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> None:
    """Swap two names in one step, so that each is always there."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


@contextmanager
def swapping(pairs: list[tuple[Path, Path]]) -> Iterator[list[int]]:
    """A thread that exchanges each pair over and over; yields a list that is as long as it did so."""
    over = threading.Event()
    done: list[int] = []

    def swap() -> None:
        while not over.is_set():
            for pair in pairs:
                exchange(*pair)
            done.append(len(done))

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join(10)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Directories of files, and beside the export a directory of the same names with other bytes."""
    for directory, data in (("export/models/a", INSIDE), ("export/models/b", INSIDE), ("outside/a", SECRET)):
        (tmp_path / directory).mkdir(parents=True)
        for number in range(FILES):
            path = tmp_path / directory / f"f{number}"
            path.write_bytes(data)
            os.utime(path, ns=(10**18, 10**18))
    return tmp_path / "export"


def versions(publication: Publication, directory: bytes) -> list[VersionId]:
    """Of the files in directories of that name."""
    entries = publication.catalog.entries
    return [VersionId(e.version) for e in entries if e.kind is Kind.FILE and entries[e.parent].name == directory]


async def outcome(source: RemoteSource, version: VersionId, *, within_s: float = 10) -> bytes | TierfsError:
    """What a client gets of the first block."""
    buffer = memoryview(bytearray(LENGTH))
    with trio.fail_after(within_s):
        try:
            await source.read_into(version, Span(0, 0, LENGTH), buffer)
        except TierfsError as error:
            return error
    return bytes(buffer)


def serve_undigested(serve: Callable[..., Serve], export: Path) -> Serve:
    """Without digests every file is opened for its first reader, and not before."""
    return serve(export, "--set", "exports..digest=false", "--set", "exports..rescan=1h")


def test_names_swapped_for_links_while_they_are_opened_never_lead_out(
    export: Path, serve: Callable[..., Serve]
) -> None:
    server = serve_undigested(serve, export)
    outside = export.parent / "outside"
    models = export / "models"
    found: list[bytes | TierfsError] = []

    async def main() -> None:
        async with running(RemoteSource(server.url, connections=2)) as source:
            publication = await source.publication()
            links = export.parent / "links"  # beside the export, on the same file system
            links.mkdir()
            (links / "a").symlink_to(outside / "a")
            pairs = [(models / "a", links / "a")]
            for number in range(0, FILES, 10):
                (links / f"b{number}").symlink_to(outside / "a" / f"f{number}")
                pairs.append((models / "b" / f"f{number}", links / f"b{number}"))

            async def read(version: VersionId) -> None:
                found.append(await outcome(source, version))

            with swapping(pairs) as swaps:
                for _ in range(3):
                    for directory in (b"a", b"b"):
                        async with trio.open_nursery() as nursery:
                            for version in versions(publication, directory):
                                nursery.start_soon(read, version)
                await trio.to_thread.run_sync(lambda: None)
            assert len(swaps) > 5, "they were swapped while it opened them"

    run(main)
    assert len(found) == 6 * FILES
    assert not any(isinstance(one, bytes) and one != INSIDE for one in found), "bytes from outside the export"
    stale = [one for one in found if not isinstance(one, bytes)]
    assert stale and all(isinstance(one, StaleVersion | SourceRefused) for one in stale), set(map(repr, stale))
    assert any(one == INSIDE for one in found)
    assert not any(str(outside) in name for name in descriptors(server.process.pid))


def test_special_files_are_not_shown_and_one_in_the_place_of_a_file_holds_nobody_up(
    export: Path, serve: Callable[..., Serve]
) -> None:
    special = export / "special"
    special.mkdir()

    def make(directory: Path) -> None:
        os.mkfifo(directory / "fifo")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(directory / "socket"))
        os.mknod(directory / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        os.mknod(directory / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 0))

    make(special)
    (special / "absolute").symlink_to("/etc/shadow")
    (special / "up").symlink_to("../../outside/a/f0")
    server = serve_undigested(serve, export)
    names = ("fifo", "socket", "zero", "disk")
    replaced = dict(zip(range(4), names, strict=True))
    later = export.parent / "later"
    later.mkdir()
    make(later)

    async def main() -> None:
        async with running(RemoteSource(server.url, connections=1)) as source:
            publication = await source.publication()
            shown = {entry.name: entry for entry in publication.catalog.entries}
            assert not {name.encode() for name in names} & shown.keys()
            for link, target in ((b"absolute", b"/etc/shadow"), (b"up", b"../../outside/a/f0")):
                assert shown[link].kind is Kind.SYMLINK and shown[link].target == target and not shown[link].version
            a = versions(publication, b"a")
            by_name = {
                entry.name: VersionId(entry.version)
                for entry in publication.catalog.entries
                if entry.version and publication.catalog.entries[entry.parent].name == b"a"
            }
            for number, name in replaced.items():
                os.rename(later / name, export / "models" / "a" / f"f{number}")
            for number in replaced:
                answer = await outcome(source, by_name[b"f%d" % number], within_s=5)
                assert isinstance(answer, StaleVersion), (number, answer)
            assert await outcome(source, by_name[b"f10"]) == INSIDE
            assert len(a) == FILES

    run(main)
    assert server.process.poll() is None


def test_an_export_is_a_name_and_no_path(export: Path, serve: Callable[..., Serve]) -> None:
    port = int(serve(export).url.rstrip("/").rpartition(":")[2])

    async def main() -> None:
        for name in (
            "..",
            "../outside",
            "/etc",
            "models/../../outside",
            "models",
            ".",
            "a\0b",
            "\x1b]0;x\x07",
            "x" * 100,
        ):
            peer = await RawPeer.connect(port)
            answer = await peer.hello(name)
            assert isinstance(answer, m.Refused) and answer.code is m.Code.NOT_FOUND, name
            assert answer.reason.isprintable()

    run(main)


def test_a_request_for_what_nobody_published_is_refused(export: Path, serve: Callable[..., Serve]) -> None:
    """Versions are hashes: one that is made up names nothing, not even a file outside."""
    port = int(serve_undigested(serve, export).url.rstrip("/").rpartition(":")[2])

    async def main() -> None:
        async with running(RemoteSource(f"tierfs://127.0.0.1:{port}/", connections=1)) as source:
            publication = await source.publication()
            size = publication.catalog.block_bytes
            version, _ = next(
                (VersionId(e.version), e.size_bytes) for e in publication.catalog.entries if e.kind is Kind.FILE
            )
        peer = await RawPeer.connect(port)
        assert isinstance(await peer.hello(), m.Welcome)
        asked = [
            m.ReadBlock(b"../../outside/a/", 0, 0, LENGTH, size),
            m.ReadBlock(bytes(16), 0, 0, LENGTH, size),
            m.ReadBlock(version, 1, 0, LENGTH, size),
            m.ReadBlock(version, (1 << 62) - 1, 0, LENGTH, size),
            m.ReadBlock(version, 0, LENGTH, 1, size),
            m.ReadBlock(version, 0, (1 << 62) - 1, LENGTH, size),
            m.ReadBlock(version, 0, 0, LENGTH + 1, size),
            m.ReadBlock(version, 0, 0, (1 << 62) - 1, size),
            m.ReadBlock(version, 0, 0, LENGTH, size * 2),
            m.GetCatalog(b"d" * 16, 0, 1),
            m.GetCatalog(b"d" * 16, (1 << 62) - 1, 4 << 20),
        ]
        for request_id, message in enumerate(asked, 1):
            await peer.send(message, request_id)
            answered, answer, data = await peer.receive()
            assert answered == request_id and isinstance(answer, m.Error) and not data, message
        await peer.send(m.ReadBlock(version, 0, 0, LENGTH, size), 99)
        _, answer, data = await peer.receive()
        assert isinstance(answer, m.BlockData) and data == INSIDE

    run(main)

"""A server that lies to a real mount: nothing is written elsewhere, memory is bounded, readers get an errno."""

import errno
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from tests.faults.hostile_server import Hostile, hostile
from tests.integration.processes import ENVIRONMENT, Mount, eventually, runs, tierfs
from tests.integration.scripted_server import Handler, Peer, Script
from tierfs.blocks.ids import digest_block
from tierfs.catalog.schema import Catalog, Entry, Kind, encode
from tierfs.wire import messages as m

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(300)]

BLOCK = 64 << 10
SIZE = 3 * BLOCK + 99
MARK = f"tierfs-hostile-{os.getpid()}".encode()
ROOT = Entry(0, b"", Kind.DIRECTORY, 0o755, 0)


def content(size_bytes: int, number: int) -> bytes:
    return bytes([number % 251 + 1]) * size_bytes


async def honest(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
    data = content(message.length_bytes, message.version[-1])
    await peer.send(m.BlockData(digest_block(data)), request_id, data)


def version(number: int) -> bytes:
    return number.to_bytes(16, "big")


def file(name: bytes, number: int = 1, size: int = SIZE, **more: int) -> Entry:
    return Entry(**{"parent": 0, "kind": Kind.FILE, "mode": 0o644, "mtime_ns": 0, "name": name,
                    "size_bytes": size, "version": version(number), **more})  # fmt: skip


def catalog(*entries: Entry, generation: int = 1, block_bytes: int = BLOCK) -> bytes:
    return encode(Catalog("", generation, block_bytes, [ROOT, *entries]))


def good(generation: int) -> bytes:
    return catalog(file(b"file"), file(b"cold-%d" % generation, 200), generation=generation)


def listing(directory: Path, *without: Path) -> set[tuple[str, int, int]]:
    """Everything below, with its size and time."""
    found = set()
    for place, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if Path(place, name) not in without]
        for name in directories + names:
            status = os.lstat(os.path.join(place, name))
            found.add((os.path.join(place, name), status.st_size, status.st_mtime_ns))
    return found


class World:
    """A hostile server and a mount of it; what may be written to is in ``work``."""

    def __init__(self, tmp_path: Path, server: Hostile, mode: str) -> None:
        self.server, self.script = server, server.script
        self.outside = tmp_path / "outside"
        self.outside.mkdir()
        (self.outside / "victim").write_bytes(b"as it was")
        work = tmp_path / "work"
        work.mkdir()
        self.warm = work / "warm"
        self.mounted = Mount(
            server.url, work, warm=f'path = "{self.warm}"\ncapacity = "64MiB"', mode=mode, timeout="1s",
            extra='[memory]\nlimit = "32MiB"\n',
        )  # fmt: skip
        self._tmp_path = tmp_path
        self._before = self._elsewhere()

    def mount(self) -> None:
        self.mounted.mount()
        assert self.read("file") == content(SIZE, 1)
        Path(f"/proc/{self.mounted.pid}/clear_refs").write_text("5")  # the peak begins anew
        self._resident = self._memory("VmRSS")

    def read(self, name: str) -> bytes:
        return (self.mounted.path / name).read_bytes()

    def errno_of(self, name: str, *, within_s: float = 20) -> str:
        """What a reader in a process of its own, which may be killed, ends with."""
        code = "import sys\ntry:\n open(sys.argv[1],'rb').read()\nexcept OSError as e:\n print(e.errno)"
        command = [sys.executable, "-c", code, str(self.mounted.path / name)]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=True).stdout
        return errno.errorcode[int(printed)] if printed else "none"

    def told(self, encoded: bytes, *, contents: bytes = b"", asks_again: int = 1, **claims: object) -> None:
        """Publish, and wait until the client has asked again so often: it has taken it or refused it."""
        script = self.script

        def publish() -> None:
            script.claimed_digest, script.claimed_bytes = b"", -1
            for name, value in claims.items():
                setattr(script, name, value)
            script.watches.clear()
            script.publish(encoded, contents=contents)

        self.server.do(publish)
        eventually(lambda: len(script.watches) >= asks_again, "the client asks again", within_s=40)

    def as_before(self, *, grown_bytes: int = 96 << 20) -> None:
        """The daemon lives and serves, nothing is elsewhere, and its memory never grew by more than that."""
        assert runs(self.mounted.pid), self.mounted.log()
        assert self.read("file") == content(SIZE, 1)
        assert self._elsewhere() == self._before
        assert (self.outside / "victim").read_bytes() == b"as it was"
        for path in (self.warm / "objects").rglob("*"):
            assert set(path.name) <= set("0123456789abcdef"), path
        assert self._memory("VmHWM") - self._resident < grown_bytes
        log = self.mounted.log()
        assert "Traceback" not in log and "by_bug" not in log, log

    def _elsewhere(self) -> object:
        places = [Path("/"), Path.cwd(), Path("/tmp"), Path.home(), self._tmp_path]
        marked = {str(found) for place in places for found in place.glob(f"*{MARK.decode()}*")}
        return listing(self.outside), marked, sorted(os.listdir(self._tmp_path))

    def _memory(self, name: str) -> int:
        line = next(one for one in Path(f"/proc/{self.mounted.pid}/status").read_text().splitlines() if name in one)
        return int(line.split()[1]) << 10


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    with hostile(Script(honest, encoded=good(1))) as server:
        made: list[World] = []

        def make(encoded: bytes = good(1), *, mode: str = "channel") -> World:
            server.script.encoded = encoded
            made.append(World(tmp_path, server, mode))
            made[-1].mount()
            return made[-1]

        yield make
        for world in made:
            world.mounted.cleanup()


def meeting(count: int) -> list[Entry]:
    """Names that were made to meet on one inode number (tests/unit/test_tree.py)."""
    zero = bytes.fromhex("cb79e64eccc0e578")
    names = [b"-" * 15 + zero + b"%08x" % number + b"-" * 32 for number in range(count)]
    return [Entry(0, name, Kind.DIRECTORY, 0o755, 0) for name in names]


def nested() -> bytes:
    return b"\x91" * 1_000_000


def directory(parent: int, name: bytes = b"d") -> Entry:
    return Entry(parent, name, Kind.DIRECTORY, 0o755, 0)


LIES: dict[str, bytes] = {
    "dots": catalog(file(b"..")),
    "a path": catalog(file(b"../../outside/" + MARK)),
    "an absolute path": catalog(file(b"/tmp/" + MARK)),
    "a NUL": catalog(file(MARK + b"\0")),
    "a cycle": catalog(directory(2), directory(1)),
    "its own parent": catalog(directory(1)),
    "beneath a file": catalog(file(b"f"), file(b"g", parent=1)),
    "one name twice": catalog(file(b"f"), file(b"f", 2)),
    "2^63 bytes": catalog(file(b"f", size=1 << 63)),
    "-1 bytes": catalog(file(b"f", size=-1)),
    "a link to nothing": catalog(Entry(0, b"l", Kind.SYMLINK, 0o777, 0, 1, target=b"")),
    "a device's mode": catalog(file(b"f", mode=0o60666)),
    "blocks of 1 byte": catalog(file(b"f"), block_bytes=1),
    "a list of 2^32": b"\x94\xa0\x01\xce\x00\x01\x00\x00\xdd\xff\xff\xff\xff" + b"\x90" * 100,
    "lists in lists": nested(),
    "no catalog": b"\xc1" * 1000,
    "nothing": b"",
}


def test_a_catalog_that_lies_changes_nothing_and_the_next_one_is_taken(make_world: Callable[..., World]) -> None:
    world = make_world()
    generation = 1
    for lie in LIES.values():
        world.told(lie, asks_again=2)
        generation += 1
        world.told(good(generation))
    for claims in ({"claimed_bytes": (1 << 62) - 1}, {"claimed_bytes": 900 << 20}, {"claimed_digest": b"d" * 16}):
        world.told(good(generation + 1000), asks_again=2, **claims)
        generation += 1
        world.told(good(generation))
    for contents in (b"not pairs", bytes(range(32)) * 1000):
        generation += 1
        world.told(good(generation), contents=contents, asks_again=2 if len(contents) % 32 else 1)
        generation += 1
        world.told(good(generation))
    eventually((world.mounted.path / f"cold-{generation}").exists, "the last one is in place")
    assert world.read(f"cold-{generation}") == content(SIZE, 200)
    world.as_before()


def test_what_a_catalog_may_say_leads_nowhere_else(make_world: Callable[..., World]) -> None:
    """Ids that would be paths, links that lead out, sizes that fill any disk, modes, names that a terminal obeys."""
    escape = b"\x1b]0;" + MARK + b"\x07[bold]\n2026-01-01 ERROR\xff"
    far = b"../../../outside/victim"
    entries = [
        file(b"file"),
        msg := file(b"path-id"),
        Entry(0, b"absolute", Kind.SYMLINK, 0o777, 0, 20, target=b"/tmp/" + MARK),
        Entry(0, b"far", Kind.SYMLINK, 0o777, 0, len(far), target=far),
        file(b"endless", 7, (1 << 48) - 1),
        file(b"setuid", 8, mode=0o6755),
        directory(0, escape),
        file(escape, 9, parent=7),
        file(b"twin-small", 10, 10),
        file(b"twin-large", 11, SIZE),
    ]
    entries[1] = Entry(0, msg.name, Kind.FILE, 0o644, 0, SIZE, b"../../outside/vi")
    # Two files of different sizes are said to have one content, and one has an id that would be an absolute path.
    pairs = version(10) + b"c" * 16 + version(11) + b"c" * 16 + version(8) + b"/tmp/" + MARK[-11:]
    world = make_world(good(1))
    world.told(catalog(*entries, generation=2), contents=pairs)
    path = world.mounted.path
    eventually((path / "path-id").exists, "the new generation is there")
    assert os.readlink(path / "far") == far.decode() and os.readlink(path / "absolute") == f"/tmp/{MARK.decode()}"
    assert (path / "path-id").read_bytes() == content(SIZE, ord("i"))
    assert (path / "setuid").read_bytes() == content(SIZE, 8)
    assert os.statvfs(path).f_flag & os.ST_NOSUID and os.statvfs(path).f_flag & os.ST_NODEV
    with (path / "endless").open("rb") as endless:
        for offset in (0, 1 << 40, (1 << 48) - 100):
            assert os.pread(endless.fileno(), 50, offset) == content(50, 7)
    assert len((path / "twin-small").read_bytes()) == 10
    assert world.errno_of("twin-large") in ("none", "EIO", "ESTALE")
    named = Path(os.fsdecode(os.fsencode(path) + b"/" + escape + b"/" + escape))
    assert named.read_bytes() == content(SIZE, 9)

    for words in (("warm", path), ("where", "--files", path), ("pin", named), ("evict", path), ("status", path),
                  ("report", path)):  # fmt: skip
        line = [sys.executable, "-m", "tierfs.cli.main", *map(os.fsencode, words)]
        done = subprocess.run(line, capture_output=True, timeout=60, env=ENVIRONMENT, check=False)
        shown = (done.stdout + done.stderr).decode()
        assert "Traceback" not in shown
        assert all(c.isprintable() or c == "\n" for c in shown), (words, shown)
        assert not any(line.startswith("2026-01-01") for line in shown.splitlines()), "a name forged a line"
        if words[0] == "status":
            assert "[bold]" in shown, "a name is no markup"
    world.as_before()


def frame(type_: int, request_id: int, *, body: bytes = b"", body_bytes: int = -1, data_bytes: int = 0) -> bytes:
    """A frame that may claim anything, with a right checksum."""
    claimed = len(body) if body_bytes < 0 else body_bytes
    head = struct.pack("<4sBBHQII", b"TFS1", 1, type_, 0, request_id, claimed, data_bytes)
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little") + body


def raw(make: Callable[[int, m.ReadBlock], bytes]) -> Handler:
    async def answer(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
        await peer.send_raw(make(request_id, message))

    return answer


async def endless_body(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
    data = bytes(1 << 20)
    await peer.send_raw(frame(m.Type.BLOCK_DATA, request_id, body=b"\x91\xc4\x10" + bytes(16), data_bytes=64 << 20))
    while True:
        await peer.send_raw(data)


async def a_flood_of_answers(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
    for number in range(10_000):
        await peer.send(m.Pong(), 1 << 40 | number)


BLOCK_LIES: dict[str, Handler] = {
    "an answer to a request never made": raw(lambda id_, _: m.encode(m.Pong(), request_id=id_ + 1_000_000)),
    "4 GiB of data": raw(lambda id_, _: frame(m.Type.BLOCK_DATA, id_, data_bytes=0xFFFFFFFF)),
    "4 GiB of body": raw(lambda id_, _: frame(m.Type.BLOCK_DATA, id_, body_bytes=0xFFFFFFFF)),
    "1 MiB of body, never sent": raw(lambda id_, _: frame(m.Type.BLOCK_DATA, id_, body_bytes=1 << 20)),
    "a type that is none": raw(lambda id_, _: frame(99, id_)),
    "a request for an answer": raw(lambda id_, _: m.encode(m.Hello("", bytes(32), "", ()), request_id=id_)),
    "an endless word": raw(lambda id_, _: m.encode(m.Error(m.Code.REFUSED, "\x1b]0;x\x07\n" * 120), request_id=id_)),
    "no answer, but bytes for ever": endless_body,
    "answers and answers": a_flood_of_answers,
    "not the protocol": raw(lambda id_, _: os.urandom(10_000)),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["direct", pytest.param("channel", marks=pytest.mark.long)])
def test_a_block_that_lies_is_an_error_to_its_reader_alone(make_world: Callable[..., World], mode: str) -> None:
    world = make_world(catalog(file(b"file"), *(file(b"%d" % n, n + 20) for n in range(len(BLOCK_LIES)))), mode=mode)
    script = world.script
    for number, (what, lie) in enumerate(BLOCK_LIES.items()):
        world.server.do(lambda lie=lie: setattr(script, "read", lie))
        began_s = time.monotonic()
        assert world.errno_of(str(number)) == "EIO", what
        assert time.monotonic() - began_s < 10, what
        assert world.read("file") == content(SIZE, 1), "what is resident is served"
    world.server.do(lambda: setattr(script, "read", honest))
    healed_by_s = time.monotonic() + 20
    for number in range(len(BLOCK_LIES)):
        while world.errno_of(str(number)) != "none":
            assert time.monotonic() < healed_by_s, world.mounted.log()
    for number in range(len(BLOCK_LIES)):
        assert world.read(str(number)) == content(SIZE, number + 20)
    world.as_before()
    assert "\x1b" not in world.mounted.log()
    assert len(world.mounted.log().splitlines()) < 300


@pytest.mark.long
def test_a_catalog_that_changes_without_end_costs_little_and_holds_nobody_up(make_world: Callable[..., World]) -> None:
    """Other names, versions and content ids several times a second, of which some were made to meet."""
    world = make_world()
    stop_s = time.monotonic() + 8
    generation = 1
    slowest_s = 0.0
    while time.monotonic() < stop_s:
        generation += 1
        names = [file(b"n%d-%d" % (generation, n), 1000 * generation + n, 10) for n in range(3000)]
        pairs = b"".join(entry.version + entry.version for entry in names)
        more = meeting(3000) if generation % 2 else []
        world.told(catalog(file(b"file"), *names, *more, generation=generation), contents=pairs)
        began_s = time.monotonic()
        assert world.read("file") == content(SIZE, 1)
        assert len(os.listdir(world.mounted.path)) >= 2
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    assert generation > 5
    assert slowest_s < 5
    world.told(good(generation + 1))
    eventually((world.mounted.path / f"cold-{generation + 1}").exists, "the good one is in place")
    world.as_before()
    state = sum(path.stat().st_size for path in (world.mounted.work / "state").rglob("*") if path.is_file())
    assert state < 8 << 20, "nothing is kept of catalogs that are gone"


def test_a_lie_at_the_first_mount_is_one_line_and_no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_RUNTIME_DIR", str(tmp_path / "run"))
    with hostile(Script(honest, encoded=catalog(*meeting(3000)))) as server:
        work = tmp_path / "work"
        work.mkdir()
        mounted = Mount(server.url, work, timeout="2s")
        try:
            refused = tierfs("mount", mounted.config, mounted.path, check=False)
        finally:
            mounted.cleanup()
    assert refused.returncode == 1 and "made to meet" in refused.stderr and len(refused.stderr.splitlines()) == 1

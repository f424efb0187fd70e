"""Channel mode on real mounts: passthrough, daemons killed under readers, killed readers, a killed channel.

Each test runs with the plain program, and the ones that stress it also with its sanitized builds.
"""

import errno
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.integration.processes import ENVIRONMENT, ROOT, Mount, Serve, drop_caches, eventually, runs, tierfs

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]

BLOCK = 4 << 20
SANITIZERS = {"plain": [], "address": ["-fsanitize=address,undefined"], "thread": ["-fsanitize=thread"]}
MakeMount = Callable[..., Mount]


def build(directory: Path, kind: str) -> Path:
    program = directory / f"tierfs-channel-{kind}"
    if not program.exists():
        sources = sorted(str(path) for path in (ROOT / "mount-helpers" / "channel").glob("*.c"))
        command = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", *SANITIZERS[kind], *sources]
        subprocess.run([*command, "-o", str(program)], check=True, timeout=120)
    return program


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(params=["plain", "address", "thread"])
def every_build(request: pytest.FixtureRequest, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use(programs, monkeypatch, request.param)
    yield


@pytest.fixture
def plain(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(programs, monkeypatch, "plain")


def use(programs: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_CHANNEL_PROGRAM", str(build(programs, kind)))
    monkeypatch.setitem(ENVIRONMENT, "TSAN_OPTIONS", "report_thread_leaks=0 halt_on_error=1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    root.chmod(0o755)
    rng = random.Random(11)
    for number in range(4):
        (root / f"m{number}").mkdir()
        (root / f"m{number}" / "weights.bin").write_bytes(rng.randbytes(6 * BLOCK + 1000 * number + 7))
    return root


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def channel_mount(mount: MakeMount, serve: Callable[..., Serve], models: Path, tmp_path: Path) -> Mount:
    server = serve(models)
    return mount(server.url, warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"', mode="channel")


def channel_status(mounted: Mount) -> dict[str, Any]:
    status = mounted.status()
    assert status["mode"] == "channel", status["mode_reason"]
    answer: dict[str, Any] = status["channel"]
    return answer


def warm(mounted: Mount) -> None:
    """Everything resident, and nothing open: the next open may be passthrough."""
    tierfs("warm", mounted.path, timeout_s=120)


def passthrough_or_skip(mounted: Mount) -> None:
    if not mounted.status()["kernel"]["passthrough"]:
        pytest.skip("this kernel has no FUSE passthrough")


def open_in_passthrough(mounted: Mount, path: Path) -> BinaryIO:
    """Open it until the kernel has it in passthrough: a reader of another kind would wait for a stopped daemon."""
    opened: list[BinaryIO] = []

    def passed() -> bool:
        before = channel_status(mounted)["passthrough_opens"]
        file = path.open("rb")
        if channel_status(mounted)["passthrough_opens"] > before:
            opened.append(file)
        else:
            file.close()
        return bool(opened)

    eventually(passed, "the file is opened in passthrough")
    return opened[0]


def new_daemon(mounted: Mount, old: int) -> int:
    """Wait for the daemon that follows; its pid."""
    found: list[int] = []

    def there() -> bool:
        done = tierfs("status", mounted.path, "--json", check=False, timeout_s=20)
        if done.returncode == 0:
            pid = int(json.loads(done.stdout)["daemon"]["pid"])
            if pid != old:
                found.append(pid)
        return bool(found)

    eventually(there, "another daemon answers", within_s=30)
    mounted.pid = found[0]
    return found[0]


def test_a_resident_file_is_read_and_mapped_in_passthrough(
    every_build: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = channel_mount(mount, serve, models, tmp_path)
    passthrough_or_skip(mounted)
    place = mounted.path / "m1" / "weights.bin"
    assert digest(place) == digest(models / "m1" / "weights.bin")  # cold: cached
    assert channel_status(mounted)["passthrough_opens"] == 0
    warm(mounted)
    drop_caches()
    reads = mounted.status()["requests"]["reads"]
    with place.open("rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == digest(models / "m1" / "weights.bin")
        with mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as view:
            assert hashlib.sha256(view).hexdigest() == digest(models / "m1" / "weights.bin")
    assert channel_status(mounted)["passthrough_opens"] == 1
    assert mounted.status()["requests"]["reads"] == reads, "reads of a passthrough handle came to the daemon"


def test_a_model_that_is_read_in_passthrough_moves_from_warm_to_hot(
    plain: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    hot = Path("/dev/shm") / f"tierfs-test-{os.getpid()}-{time.monotonic_ns()}"
    server = serve(models)
    try:
        mounted = mount(
            server.url,
            warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"',
            hot=f'path = "{hot}"\ncapacity = "64MiB"\nadmit = "second"',
            mode="channel",
        )
        passthrough_or_skip(mounted)
        tierfs("warm", mounted.path / "m1", "--tier", "warm", timeout_s=120)
        place = mounted.path / "m1" / "weights.bin"
        open_in_passthrough(mounted, place).close()
        assert mounted.status()["tiers"]["warm"]["handed_out"] >= 1
        time.sleep(5.5)  # a load that begins sooner is the same one
        place.open("rb").close()
        assert mounted.status()["tiers"]["hot"]["handed_out"] == 0
        eventually(lambda: mounted.status()["promotion"]["promoted_models"] == 1, "the model is hot", within_s=60)
        drop_caches()
        with open_in_passthrough(mounted, place) as file:
            assert hashlib.sha256(file.read()).hexdigest() == digest(models / "m1" / "weights.bin")
        assert mounted.status()["tiers"]["hot"]["handed_out"] >= 1
        assert mounted.status()["source"]["fetched_bytes"] <= 7 * BLOCK
    finally:
        shutil.rmtree(hot, ignore_errors=True)


def test_an_open_for_writing_is_refused(
    plain: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = channel_mount(mount, serve, models, tmp_path)
    warm(mounted)
    with pytest.raises(OSError, match="Read-only"):
        os.open(mounted.path / "m0" / "weights.bin", os.O_RDWR)


def test_a_cached_handle_holds_passthrough_back_until_it_is_closed(
    plain: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = channel_mount(mount, serve, models, tmp_path)
    passthrough_or_skip(mounted)
    place = mounted.path / "m2" / "weights.bin"
    with place.open("rb") as cached:
        cached.read(10)
        warm(mounted)
        with place.open("rb") as second:
            assert hashlib.sha256(second.read()).hexdigest() == digest(models / "m2" / "weights.bin")
        assert channel_status(mounted)["held_back_opens"] == 1
        assert channel_status(mounted)["passthrough_opens"] == 0
    eventually(lambda: mounted.status()["open_files"] == 0, "the handles are released")
    assert digest(place) == digest(models / "m2" / "weights.bin")
    assert channel_status(mounted)["passthrough_opens"] == 1


READER = """
import hashlib, mmap, os, sys, time
path, expected, seconds, how = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
end = time.monotonic() + seconds
rounds = 0
while time.monotonic() < end:
    if how == "list":
        names = sorted(os.listdir(path))
        assert names == expected.split(","), names
    else:
        with open(path, "rb") as file:
            if how == "mmap":
                with mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as view:
                    found = hashlib.sha256(view).hexdigest()
            else:
                found = hashlib.sha256(file.read()).hexdigest()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert found == expected, "wrong bytes"
    rounds += 1
print(rounds)
"""


def test_daemons_killed_again_and_again_cost_readers_nothing_but_time(
    every_build: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = channel_mount(mount, serve, models, tmp_path)
    warm_file, cold_file = "m0/weights.bin", "m3/weights.bin"
    tierfs("warm", mounted.path / "m0", timeout_s=60)
    jobs = [(cold_file, "read"), (cold_file, "mmap"), (warm_file, "mmap"), (warm_file, "read")]
    commands = [[str(mounted.path / name), digest(models / name), "9", how] for name, how in jobs]
    commands.append([str(mounted.path), "m0,m1,m2,m3", "9", "list"])
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for command in commands
    ]
    try:
        pid = mounted.pid
        for _ in range(4):
            time.sleep(1.0)
            os.kill(pid, signal.SIGKILL)
            pid = new_daemon(mounted, pid)
        for reader in readers:
            out, err = reader.communicate(timeout=60)
            assert reader.returncode == 0, err.decode()
            assert int(out) > 0
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    status = channel_status(mounted)
    assert status["daemon_starts"] == 5
    assert status["bad_messages"] == 0
    assert status["given_up_requests"] == 0
    eventually(lambda: channel_status(mounted)["pending"] == 0, "no request is lost")


def test_a_stopped_daemon_leaves_passthrough_alone_and_nobody_unkillable(
    plain: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = channel_mount(mount, serve, models, tmp_path)
    passthrough_or_skip(mounted)
    warm(mounted)
    with open_in_passthrough(mounted, mounted.path / "m0" / "weights.bin") as resident:
        os.kill(mounted.pid, signal.SIGSTOP)
        try:
            drop_caches()
            assert hashlib.sha256(resident.read()).hexdigest() == digest(models / "m0" / "weights.bin")
            with subprocess.Popen(["stat", str(mounted.path / "m3" / "weights.bin.not-there")]) as waiting:
                eventually(lambda: blocked(waiting.pid), "the reader waits")
                waiting.kill()
                started = time.monotonic()
                waiting.wait(5)
                assert time.monotonic() - started < 2
        finally:
            os.kill(mounted.pid, signal.SIGCONT)
    assert digest(mounted.path / "m3" / "weights.bin") == digest(models / "m3" / "weights.bin")


def blocked(pid: int) -> bool:
    try:
        return (
            "fuse" in Path(f"/proc/{pid}/wchan").read_text() or "request_wait" in Path(f"/proc/{pid}/stack").read_text()
        )
    except OSError:
        return False


def test_a_killed_channel_ends_the_mount_and_the_next_mount_heals_it(
    plain: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = channel_mount(mount, serve, models, tmp_path)
    os.kill(int(channel_status(mounted)["pid"]), signal.SIGKILL)
    # A request that was under way then is told ECONNABORTED; everything after it, ENOTCONN.
    eventually(lambda: error_of_list(mounted.path) == errno.ENOTCONN, "the mount has ended", within_s=5)
    eventually(lambda: not runs(mounted.pid), "the daemon ends with its channel")
    mounted.mount()
    assert digest(mounted.path / "m1" / "weights.bin") == digest(models / "m1" / "weights.bin")


def test_an_aborted_connection_leaves_no_dead_mount(
    plain: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = channel_mount(mount, serve, models, tmp_path)
    minor = os.minor(os.stat(mounted.path).st_dev)
    Path(f"/sys/fs/fuse/connections/{minor}/abort").write_text("1")
    eventually(lambda: not os.path.ismount(mounted.path), "the channel unmounts what is of no use", within_s=10)
    eventually(lambda: not runs(mounted.pid), "the daemon ends")
    mounted.mount()
    assert digest(mounted.path / "m1" / "weights.bin") == digest(models / "m1" / "weights.bin")


def error_of_list(path: Path) -> int | None:
    try:
        os.listdir(path)
    except OSError as error:
        return error.errno
    return None


def test_a_daemon_is_replaced_on_purpose_under_load(
    plain: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    mounted = channel_mount(mount, serve, models, tmp_path)
    command = [str(mounted.path / "m1" / "weights.bin"), digest(models / "m1" / "weights.bin"), "6", "read"]
    with subprocess.Popen([sys.executable, "-c", READER, *command], stderr=subprocess.PIPE) as reader:
        time.sleep(0.5)
        before = mounted.pid
        tierfs("restart", mounted.path, timeout_s=60)
        mounted.pid = int(mounted.status()["daemon"]["pid"])
        assert mounted.pid != before
        _, err = reader.communicate(timeout=60)
        assert reader.returncode == 0, err.decode()


@pytest.mark.parametrize("while_dead", [False, True])
def test_an_open_file_of_an_older_version_is_still_that_version_for_the_next_daemon(
    plain: None, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve], while_dead: bool
) -> None:
    root = tmp_path / "published"
    root.mkdir()
    old, new = random.Random(1).randbytes(2 * BLOCK + 5), random.Random(2).randbytes(2 * BLOCK + 5)
    (root / "weights.bin").write_bytes(old)
    server = serve(root, "--set", "exports..rescan=200ms")
    mounted = mount(
        server.url, warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"', mode="channel", options='metadata_ttl = "0s"'
    )
    place = mounted.path / "weights.bin"
    with place.open("rb", buffering=0) as held:
        assert os.pread(held.fileno(), 10, 0) == old[:10]
        warm(mounted)

        def publish() -> None:
            (root / "next").write_bytes(new)
            (root / "next").rename(root / "weights.bin")

        before = mounted.pid
        if while_dead:
            os.kill(before, signal.SIGSTOP)
            publish()
        else:
            publish()
            eventually(lambda: place.read_bytes() == new, "the new version is there")
        os.kill(before, signal.SIGKILL)
        new_daemon(mounted, before)
        eventually(lambda: place.read_bytes() == new, "the new version is there")
        drop_caches()
        assert os.pread(held.fileno(), len(old), 0) == old


def test_without_a_daemon_in_time_requests_fail_and_the_mount_goes(
    plain: None, models: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    server = serve(models)
    mounted = mount(
        server.url,
        warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"',
        mode="channel",
        options='restart_grace = "2s"',
    )
    mounted.config.write_text("this is no configuration")
    os.kill(mounted.pid, signal.SIGKILL)
    with pytest.raises(OSError):
        while True:
            os.stat(mounted.path / "m0" / f"no-such-file-{time.monotonic()}")
            raise AssertionError("answered without a daemon")
    eventually(lambda: not os.path.ismount(mounted.path), "the mount has gone")

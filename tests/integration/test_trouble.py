"""What a reader, an operator and the machine see when the source, the daemon or a tier is hurt."""

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import Mount, Serve, drop_caches, eventually, runs, tierfs

pytestmark = pytest.mark.fuse

BLOCK = 4 << 20
MakeServe = Callable[..., Serve]
MakeMount = Callable[..., Mount]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    rng = random.Random(11)
    for model in ("a", "b"):
        (root / model).mkdir(parents=True)
        (root / model / "model.bin").write_bytes(rng.randbytes(6 * BLOCK + 99))
    return root


def warm_tier(tmp_path: Path, capacity: str = "1GiB") -> str:
    return f'path = "{tmp_path}/warm"\ncapacity = "{capacity}"'


def sum_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def error_of(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def test_source_down_serves_what_is_resident_fails_the_rest_in_time_and_recovers(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    server = serve(models)
    mounted = mount(server.url, warm=warm_tier(tmp_path), timeout="2s")
    tierfs("warm", mounted.path / "a")
    server.kill()
    drop_caches()
    assert sum_of(mounted.path / "a" / "model.bin") == sum_of(models / "a" / "model.bin")
    start = time.monotonic()
    assert error_of((mounted.path / "b" / "model.bin").read_bytes) == errno.EIO
    assert 1.5 < time.monotonic() - start < 8
    start = time.monotonic()
    assert sorted(os.listdir(mounted.path)) == ["a", "b"]
    assert os.statvfs(mounted.path).f_blocks > 0
    status = mounted.status()
    assert time.monotonic() - start < 5
    assert status["source"]["state"] != "connected" and status["source"]["reason"]
    assert [(model["path"], model["eta_s"] is None) for model in status["models"]] == [("a", False), ("b", True)]
    assert "not known while the source is away" in tierfs("where", mounted.path / "b").stdout
    server.start()
    eventually(lambda: mounted.status()["source"]["state"] == "connected", "the source is back")
    assert sum_of(mounted.path / "b" / "model.bin") == sum_of(models / "b" / "model.bin")


def test_a_short_outage_under_a_map_is_only_time(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    server = serve(models)
    mounted = mount(server.url, warm=warm_tier(tmp_path), timeout="20s")
    server.kill()
    program = (
        "import mmap, hashlib, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print('mapped', flush=True)\n"
        "print(hashlib.sha256(mapped).hexdigest())\n"
    )
    command = [sys.executable, "-c", program, str(mounted.path / "a" / "model.bin")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "mapped\n"
        eventually(lambda: mounted.status()["oldest_request_s"] > 0.5, "the fault waits")
        server.start()
        out, _ = reader.communicate(timeout=30)
    assert (reader.returncode, out.strip()) == (0, sum_of(models / "a" / "model.bin"))


def test_a_silent_source_holds_neither_names_nor_status_nor_resident_bytes(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    server = serve(models)
    mounted = mount(server.url, warm=warm_tier(tmp_path), timeout="4s")
    tierfs("warm", mounted.path / "a")
    drop_caches()
    server.process.send_signal(signal.SIGSTOP)
    results: list[int | None] = []
    readers = [
        threading.Thread(target=lambda: results.append(error_of((mounted.path / "b" / "model.bin").read_bytes)))
        for _ in range(20)
    ]
    for reader in readers:
        reader.start()
    eventually(lambda: mounted.status()["requests"]["running"] > 0, "readers wait")
    start = time.monotonic()
    assert sum_of(mounted.path / "a" / "model.bin") == sum_of(models / "a" / "model.bin")
    assert len(os.listdir(mounted.path / "b")) == 1
    assert (mounted.path / "b" / "model.bin").stat().st_size == 6 * BLOCK + 99
    assert mounted.status()["oldest_request_s"] > 0
    assert time.monotonic() - start < 3
    for reader in readers:
        reader.join(20)
    assert results == [errno.EIO] * 20
    server.process.send_signal(signal.SIGCONT)
    eventually(
        lambda: error_of((mounted.path / "b" / "model.bin").read_bytes) is None, "the source answers again", within_s=30
    )
    assert sum_of(mounted.path / "b" / "model.bin") == sum_of(models / "b" / "model.bin")


def test_stopping_with_a_silent_source_and_waiting_readers_is_quick(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    server = serve(models)
    mounted = mount(server.url, warm=warm_tier(tmp_path), timeout="60s")
    server.process.send_signal(signal.SIGSTOP)
    results: list[int | None] = []
    reader = threading.Thread(target=lambda: results.append(error_of((mounted.path / "a" / "model.bin").read_bytes)))
    reader.start()
    eventually(lambda: mounted.status()["requests"]["running"] > 0, "the reader waits")
    start = time.monotonic()
    os.kill(mounted.pid, signal.SIGTERM)
    eventually(lambda: not Path(f"/proc/{mounted.pid}").exists(), "the daemon has ended", within_s=10)
    assert time.monotonic() - start < 10
    reader.join(10)
    assert not reader.is_alive() and results[0] is not None
    assert f" {mounted.path} " not in Path("/proc/mounts").read_text()


def test_unmount_while_files_are_open_mapped_and_a_directory_is_in_use(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    mounted = mount(serve(models).url, warm=warm_tier(tmp_path))
    program = (
        "import os, sys, time; file = open('model.bin', 'rb'); file.read(10); print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=mounted.path / "a", stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "in\n"
            start = time.monotonic()
            with (mounted.path / "b" / "model.bin").open("rb", buffering=0) as open_file:
                mounted.unmount()
                assert time.monotonic() - start < 10
                assert f" {mounted.path} " not in Path("/proc/mounts").read_text()
                assert error_of(lambda: open_file.read(1)) in (errno.ENOTCONN, errno.ECONNABORTED)
        finally:
            holder.kill()


def test_a_killed_daemon_leaves_a_mount_that_the_next_one_clears_and_its_content_is_warm(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    mounted = mount(serve(models).url, warm=warm_tier(tmp_path))
    tierfs("warm", mounted.path / "a")
    mounted.kill()
    assert error_of(lambda: os.listdir(mounted.path)) in (errno.ENOTCONN, errno.ECONNABORTED)
    refused = tierfs("status", mounted.path, check=False)
    assert refused.returncode == 1 and "is gone" in refused.stderr and len(refused.stderr.splitlines()) == 1
    mounted.mount()
    drop_caches()
    assert sum_of(mounted.path / "a" / "model.bin") == sum_of(models / "a" / "model.bin")
    status = mounted.status()
    assert status["source"]["fetched_bytes"] == 0
    lines = [line for line in Path("/proc/mounts").read_text().splitlines() if f" {mounted.path} " in line]
    assert len(lines) == 1


def test_a_second_daemon_on_one_warm_directory_is_refused_with_the_reason(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    server = serve(models)
    first = mount(server.url, warm=warm_tier(tmp_path))
    with pytest.raises(AssertionError, match=str(first.pid)):
        mount(server.url, warm=warm_tier(tmp_path))


def test_with_the_source_down_at_start_the_saved_catalog_and_resident_bytes_are_served(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    server = serve(models)
    mounted = mount(server.url, warm=warm_tier(tmp_path), timeout="2s")
    tierfs("warm", mounted.path / "a")
    mounted.unmount()
    server.kill()
    mounted.mount()
    assert sum_of(mounted.path / "a" / "model.bin") == sum_of(models / "a" / "model.bin")
    assert error_of((mounted.path / "b" / "model.bin").read_bytes) == errno.EIO
    server.start()
    eventually(lambda: error_of((mounted.path / "b" / "model.bin").read_bytes) is None, "the source is used again")


@pytest.mark.parametrize("hurt", ["flip", "truncate", "swap", "punch"])
def test_hurt_blocks_in_warm_are_replaced_and_never_served(
    hurt: str, models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    mounted = mount(serve(models).url, warm=warm_tier(tmp_path))
    tierfs("warm", mounted.path / "a")
    mounted.unmount()
    objects = [path for path in (tmp_path / "warm").rglob("*") if path.is_file() and path.stat().st_size > BLOCK]
    assert len(objects) == 1
    with objects[0].open("r+b") as file:
        if hurt == "flip":
            file.seek(BLOCK + 1234)
            byte = file.read(1)[0]
            file.seek(BLOCK + 1234)
            file.write(bytes([byte ^ 1]))
        elif hurt == "truncate":
            file.truncate(2 * BLOCK + 7)
        elif hurt == "swap":
            one, two = os.pread(file.fileno(), BLOCK, 0), os.pread(file.fileno(), BLOCK, BLOCK)
            os.pwrite(file.fileno(), two, 0)
            os.pwrite(file.fileno(), one, BLOCK)
        else:
            subprocess.run(["fallocate", "-p", "-o", str(BLOCK), "-l", str(BLOCK), objects[0]], check=True)
    mounted.mount()
    want = (models / "a" / "model.bin").read_bytes()
    with (mounted.path / "a" / "model.bin").open("rb") as file:
        rng = random.Random(5)
        for _ in range(200):  # small slices first: they must not be trusted either
            offset = rng.randrange(len(want))
            assert os.pread(file.fileno(), 4096, offset) == want[offset : offset + 4096]
    drop_caches()
    assert sum_of(mounted.path / "a" / "model.bin") == hashlib.sha256(want).hexdigest()
    status = mounted.status()
    assert status["source"]["fetched_blocks"] >= 1
    if hurt != "truncate":  # a shortened object is seen at start, without reading
        assert status["tiers"]["warm"]["corrupt_blocks"] >= 1


def test_eight_processes_reading_one_cold_file_fetch_each_block_once(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    mounted = mount(serve(models).url, warm=warm_tier(tmp_path))
    commands = [["sha256sum", str(mounted.path / "a" / "model.bin")]] * 8
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        out, _ = process.communicate(timeout=60)
        assert out.split()[0] == sum_of(models / "a" / "model.bin")
    assert mounted.status()["source"]["fetched_blocks"] == 7


def test_a_model_larger_than_warm_does_not_thrash_it(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    (models / "big").mkdir()
    want = random.Random(4).randbytes(30 * BLOCK)
    (models / "big" / "model.bin").write_bytes(want)
    mounted = mount(
        serve(models).url, warm=warm_tier(tmp_path, "80MiB"), extra='[memory]\nlimit = "64MiB"\n'
    )  # 20 blocks of 30
    seen = []
    for _ in range(2):
        drop_caches()
        assert sum_of(mounted.path / "big" / "model.bin") == hashlib.sha256(want).hexdigest()
        eventually(lambda: mounted.status()["tiers"]["warm"]["queued_bytes"] == 0, "all is written")
        seen.append(mounted.status())
    first, second = seen
    kept = first["tiers"]["warm"]["used_bytes"] // BLOCK  # fewer than fit where the disk was slower than the source
    assert kept >= 10
    assert second["tiers"]["warm"]["used_bytes"] <= 80 << 20
    assert second["tiers"]["warm"]["evicted_blocks"] == 0
    # whatever the first pass kept, the second finds
    assert second["source"]["fetched_blocks"] - first["source"]["fetched_blocks"] <= 30 - kept


@pytest.mark.parametrize(("before", "after"), [("1MiB", "4MiB"), ("4MiB", "1MiB")])
def test_another_block_size_is_never_other_bytes(
    before: str, after: str, models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    server = serve(models, "--set", f"exports..block_size={before}")
    mounted = mount(server.url, warm=warm_tier(tmp_path), timeout="2s")
    want = (models / "a" / "model.bin").read_bytes()

    def compare() -> set[int | None]:
        """Each slice is right or an error; the errors."""
        errors: set[int | None] = set()
        with (mounted.path / "a" / "model.bin").open("rb") as file:
            for offset in range(0, len(want), 4096 * 61):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                try:
                    assert os.pread(file.fileno(), 4096, offset) == want[offset : offset + 4096], offset
                except OSError as error:
                    errors.add(error.errno)
        return errors

    with (mounted.path / "a" / "model.bin").open("rb") as file:
        assert os.pread(file.fileno(), 100, 0) == want[:100]
    server.kill()
    server.command[server.command.index(f"exports..block_size={before}")] = f"exports..block_size={after}"
    server.start()
    eventually(lambda: mounted.status()["source"]["state"] == "connected", "the source is back")
    assert compare() <= {errno.ESTALE, errno.EIO}
    mounted.unmount()
    mounted.mount()
    for _ in range(2):
        drop_caches()
        assert compare() == set()
        assert sum_of(mounted.path / "a" / "model.bin") == hashlib.sha256(want).hexdigest()


def test_a_daemon_that_is_stopped_can_be_unmounted(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    mounted = mount(serve(models).url)
    os.kill(mounted.pid, signal.SIGSTOP)
    refused = tierfs("mount", mounted.config, mounted.path, check=False, timeout_s=20)
    assert refused.returncode == 1 and "already mounted" in refused.stderr
    start = time.monotonic()
    tierfs("unmount", mounted.path, timeout_s=30)
    assert time.monotonic() - start < 15
    assert f" {mounted.path} " not in Path("/proc/mounts").read_text()
    assert not runs(mounted.pid)


def test_the_source_may_be_a_directory(models: Path, tmp_path: Path, mount: MakeMount) -> None:
    mounted = mount(f"dir:{models}", warm=warm_tier(tmp_path))
    for _ in range(2):
        drop_caches()
        assert sum_of(mounted.path / "b" / "model.bin") == sum_of(models / "b" / "model.bin")
    assert mounted.status()["source"]["fetched_blocks"] == 7


def test_hot_on_tmpfs_serves_and_survives_a_punched_object(
    models: Path, tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    hot = tmp_path / "hot"
    hot.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", hot], check=True)
    try:
        mounted = mount(serve(models).url, hot=f'path = "{hot}/tier"\ncapacity = "200MiB"')
        want = sum_of(models / "a" / "model.bin")
        assert sum_of(mounted.path / "a" / "model.bin") == want
        eventually(lambda: mounted.status()["tiers"]["hot"]["written_blocks"] == 7, "the model is in hot")
        drop_caches()
        assert sum_of(mounted.path / "a" / "model.bin") == want
        assert mounted.status()["source"]["fetched_blocks"] == 7
        assert mounted.status()["tiers"]["hot"]["kind"] == "tmpfs"
        objects = [path for path in hot.rglob("*") if path.is_file() and path.stat().st_size > BLOCK]
        subprocess.run(["fallocate", "-p", "-o", "0", "-l", str(2 * BLOCK), objects[0]], check=True)
        drop_caches()
        assert sum_of(mounted.path / "a" / "model.bin") == want
        mounted.unmount()
    finally:
        subprocess.run(["umount", "-l", hot], check=True)

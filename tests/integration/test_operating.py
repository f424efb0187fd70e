"""The commands an operator has, on real mounts: pin, evict, verify, where, top, reload, status --ready."""

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import ENVIRONMENT, Mount, Serve, drop_caches, tierfs
from tests.integration.processes import eventually as eventually_within
from tests.integration.test_channel import build
from tests.local_tiers import object_files

# Dozens of commands, each of which is a Python that starts.
pytestmark = [pytest.mark.fuse, pytest.mark.slow, pytest.mark.timeout(400)]

MIB = 1 << 20
SIZE = 8 * MIB
MakeServe = Callable[..., Serve]
MakeMount = Callable[..., Mount]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands without a path are about all mounts of this user: these are the only ones."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    for name in ("a", "b", "c", "d", "e"):
        (root / name).mkdir(parents=True)
        (root / name / "model.bin").write_bytes(os.urandom(SIZE))
    return root


@pytest.fixture
def mounted(tmp_path: Path, models: Path, serve: MakeServe, mount: MakeMount) -> Mount:
    """A mount whose warm tier has room for four of the five models, or two while their blocks count twice."""
    server = serve(models, "--set", "exports..block_size=1MiB", "--set", "exports..rescan=200ms")
    return mount(server.url, warm=f'path = "{tmp_path}/warm"\ncapacity = "36MiB"', options='metadata_ttl = "200ms"\n')


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Each look is a command or two, of seconds where the machine is busy."""
    eventually_within(condition, what, within_s=90)


def answers(*arguments: object) -> list[dict[str, Any]]:
    """The list that a command prints with --json."""
    found: list[dict[str, Any]] = json.loads(tierfs(*arguments, "--json").stdout)
    return found


def resident(mounted: Mount, name: str) -> int:
    return int(answers("where", mounted.path / name)[0]["resident_bytes"])


def publish(path: Path, data: bytes) -> None:
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)


def test_a_pinned_model_stays_and_comes_back_after_a_new_daemon(mounted: Mount, models: Path) -> None:
    said = tierfs("pin", mounted.path / "a").stdout
    assert said.strip() == "a (model, 1 file): pinned in warm, 8MiB of 8MiB resident"
    for _ in range(2):
        tierfs("warm", *(mounted.path / name for name in ("b", "c", "d", "e")), check=False)
    assert resident(mounted, "a") == SIZE
    (pinned,) = answers("pin")
    assert (pinned["mountpoint"], pinned["path"], pinned["state"]) == (str(mounted.path), "a", "resident")
    assert next(m for m in mounted.status()["models"] if m["path"] == "a")["pinned_bytes"] == SIZE
    assert str(mounted.path / "a") in tierfs("pin").stdout
    refused = tierfs("evict", mounted.path / "a", check=False)
    assert refused.returncode == 1 and "pinned with a: tierfs unpin" in refused.stderr
    assert "do not fit" in tierfs("pin", mounted.path, check=False).stderr

    mounted.unmount()
    mounted.mount()
    for _ in range(2):
        generation = mounted.status()["catalog"]["generation"]
        new = os.urandom(SIZE)
        publish(models / "a" / "model.bin", new)

        def is_new(before: int = generation) -> bool:
            return bool(mounted.status()["catalog"]["generation"] > before)

        eventually(is_new, "the new version is published")
        eventually(lambda: answers("pin")[0]["state"] == "resident", "and brought, though nobody reads it")
        assert resident(mounted, "a") == SIZE
        eventually(lambda: (mounted.path / "a" / "model.bin").read_bytes() == new, "and right")  # noqa: B023
    assert tierfs("unpin", mounted.path / "a").stdout.strip() == "a: no longer pinned in warm"
    assert answers("pin") == []
    assert "is not pinned" in tierfs("unpin", mounted.path / "a", check=False).stderr


def test_evicting_frees_what_nobody_uses(mounted: Mount, tmp_path: Path) -> None:
    tierfs("warm", mounted.path / "a", mounted.path / "b")
    with (mounted.path / "a" / "model.bin").open("rb"):
        done = tierfs("evict", mounted.path / "a", mounted.path / "b", check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["a (model): 0B evicted", "b (model): 8MiB evicted (warm 8MiB)"]
    assert done.stderr.strip() == "tierfs: 8MiB in 1 file stay; the first: a/model.bin in warm is open"
    assert len(object_files(tmp_path / "warm")) == 1
    drop_caches()  # the kernel closes what it has

    def freed() -> bool:
        done = tierfs("evict", mounted.path / "a", "--json", check=False)
        return bool(json.loads(done.stdout)[0]["freed_bytes"] == SIZE)

    eventually(freed, "it is closed")
    assert object_files(tmp_path / "warm") == [] and mounted.status()["tiers"]["warm"]["used_bytes"] == 0


def test_verifying_repairs_and_says_so_by_its_status(mounted: Mount, tmp_path: Path) -> None:
    tierfs("warm", mounted.path / "a", mounted.path / "b")
    assert "16 blocks good, 0 bad" in tierfs("verify", mounted.path, "--rate", "1GiB/s").stdout
    for path in object_files(tmp_path / "warm"):
        flip(path)
    done = tierfs("verify", mounted.path / "a", "--no-repair", check=False)
    assert done.returncode == 2 and "not repaired" in done.stdout
    done = tierfs("verify", mounted.path, "--json", check=False)
    answer = json.loads(done.stdout)
    assert done.returncode == 1, done
    assert (answer["good_blocks"], answer["bad_blocks"], answer["repaired_blocks"]) == (14, 1, 1)
    assert tierfs("verify", mounted.path).returncode == 0
    assert resident(mounted, "b") == SIZE
    assert tierfs("verify", tmp_path, check=False).returncode == 3
    assert "verify_found_bad" in mounted.log()


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(3 * MIB + 5)
        byte = file.read(1)
        file.seek(3 * MIB + 5)
        file.write(bytes([byte[0] ^ 1]))


def test_where_says_each_file_and_status_whether_a_model_is_ready(mounted: Mount) -> None:
    done = tierfs("status", "--ready", mounted.path / "a", check=False)
    assert done.returncode == 1 and "a: not ready: 8MiB of 8MiB are missing" in done.stdout
    tierfs("warm", mounted.path / "a")
    assert tierfs("status", "--ready", mounted.path / "a").stdout.strip() == "a: ready: all of it is resident"
    assert json.loads(tierfs("status", "--ready", mounted.path / "a", "--json").stdout)["ready"] is True
    lines = tierfs("where", mounted.path, "--files").stdout.splitlines()
    assert any(line.startswith("  a/model.bin: 8MiB; warm 8MiB, only at the source 0B") for line in lines)
    assert lines[-1].startswith("at the rates measured so far: source ")


def test_what_status_says_of_a_model_is_true_while_it_is_loaded(mounted: Mount, tmp_path: Path) -> None:
    reading = threading.Thread(target=read_slowly, args=(mounted.path / "a" / "model.bin",))
    seen = []
    reading.start()
    while reading.is_alive():
        before = {model["path"]: model for model in mounted.status()["models"]}["a"]
        on_disk = sum(path.stat().st_blocks * 512 for path in object_files(tmp_path / "warm"))
        assert before["bytes"] == SIZE and before["resident_bytes"] <= on_disk
        assert before["eta_s"] is None or before["eta_s"] >= 0
        seen.append(before["resident_bytes"])
    reading.join()
    assert seen == sorted(seen)
    eventually(lambda: resident(mounted, "a") == SIZE, "all of it is written")
    model = {model["path"]: model for model in mounted.status()["models"]}["a"]
    assert model["resident_bytes"] == SIZE and model["eta_s"] is not None
    rates = answers("where", mounted.path / "b")[0]
    assert rates["eta_s"] == pytest.approx(SIZE / rates["bytes_per_s"]["source"])


def read_slowly(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(MIB):
            time.sleep(0.1)


def test_top_prints_a_line_each_time(mounted: Mount) -> None:
    command = [
        sys.executable,
        "-m",
        "tierfs.cli.main",
        "top",
        str(mounted.path),
        "--interval",
        "1500ms",
        "--count",
        "4",
    ]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as top:
        assert top.stdout is not None
        first = json.loads(top.stdout.readline())
        (mounted.path / "a" / "model.bin").read_bytes()
        rest = [json.loads(line) for line in top.stdout]
    assert top.returncode == 0 and len(rest) == 3
    assert first["read_bytes_per_s"] == {"warm": 0.0, "source": 0.0}
    fetched = sum(one["read_bytes_per_s"]["source"] * one["interval_s"] for one in rest)
    assert fetched == pytest.approx(SIZE)
    assert sum(model["resident_bytes_per_s"] * one["interval_s"] for one in rest for model in one["models"]) > 0
    (line,) = tierfs("top", "--interval", "100ms", "--count", "1").stdout.splitlines()
    assert "warm 0B/s, source 0B/s" in line and "oldest" in line


def test_reloading_takes_what_it_can_and_names_the_rest(mounted: Mount) -> None:
    text = mounted.config.read_text()
    assert "nothing has changed" in tierfs("reload", mounted.path).stdout
    mounted.config.write_text(text.replace("36MiB", "30MiB") + '[memory]\nlimit = "512MiB"\n')
    lines = tierfs("reload", mounted.path).stdout.splitlines()
    assert sorted(lines) == [
        "memory.limit: 1GiB -> 512MiB needs unmounting and mounting again",
        "warm.capacity: 36MiB -> 30MiB",
    ]
    assert mounted.status()["tiers"]["warm"]["capacity_bytes"] == 30 * MIB
    mounted.config.write_text(text.replace("36MiB", "many"))
    refused = tierfs("reload", mounted.path, check=False)
    assert refused.returncode == 1 and "warm.capacity" in refused.stderr and "nothing was changed" in refused.stderr
    os.kill(mounted.pid, signal.SIGHUP)
    eventually(lambda: "reload_refused" in mounted.log(), "it is refused there as well")
    mounted.config.write_text(text.replace("36MiB", "12MiB"))
    os.kill(mounted.pid, signal.SIGHUP)
    eventually(lambda: mounted.status()["tiers"]["warm"]["capacity_bytes"] == 12 * MIB, "SIGHUP reloads")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_under_a_channel_the_commands_say_the_same(
    tmp_path: Path, models: Path, serve: MakeServe, mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_CHANNEL_PROGRAM", str(build(tmp_path, "plain")))
    server = serve(models, "--set", "exports..block_size=1MiB")
    mounted = mount(server.url, warm=f'path = "{tmp_path}/warm"\ncapacity = "36MiB"', mode="channel")
    tierfs("pin", mounted.path / "a")
    tierfs("warm", mounted.path / "b")
    with (mounted.path / "b" / "model.bin").open("rb") as opened:  # perhaps in passthrough
        refused = tierfs("evict", mounted.path / "b", check=False)
        assert "b/model.bin in warm is open" in refused.stderr
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    freed = json.loads(tierfs("evict", mounted.path / "b", "--json", check=False).stdout)[0]
    if freed["refused_files"]:  # a map keeps the file open
        assert freed["freed_bytes"] == 0 and mapped[:] == (models / "b" / "model.bin").read_bytes()
    mapped.close()
    eventually(lambda: tierfs("evict", mounted.path / "b", check=False).returncode == 0, "it is closed")
    eventually(lambda: mounted.status()["tiers"]["warm"]["dying_bytes"] == 0, "nobody maps it")
    one = json.loads(tierfs("top", mounted.path, "--interval", "200ms", "--count", "1", "--json").stdout)
    assert one["daemon_opens_per_s"] == 0 and "error" not in one

    daemon = mounted.status()["daemon"]["pid"]
    mounted.config.write_text(mounted.config.read_text().replace("36MiB", "40MiB") + '[memory]\nlimit = "512MiB"\n')
    lines = sorted(tierfs("reload", mounted.path).stdout.splitlines())
    assert lines == ["memory.limit: 1GiB -> 512MiB needs `tierfs restart`", "warm.capacity: 36MiB -> 40MiB"]
    assert mounted.status()["daemon"]["pid"] == daemon
    tierfs("restart", mounted.path)  # another daemon has the same pins
    assert [(pinned["path"], pinned["state"]) for pinned in answers("pin")] == [("a", "resident")]
    assert "nothing has changed" in tierfs("reload", mounted.path).stdout
    assert "8 blocks good, 0 bad" in tierfs("verify", mounted.path / "a").stdout

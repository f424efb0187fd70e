"""`tierfs doctor` on this machine: it says what is here, changes nothing, never hangs, and its exit status tells."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Mount, Serve, eventually, tierfs
from tests.media import Disk, can_break

pytestmark = pytest.mark.usefixtures("own_runtime_dir")

MakeServe = Callable[..., Serve]
MakeMount = Callable[..., Mount]


def examined(*arguments: object, expect: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """The findings by name."""
    done = tierfs("doctor", *arguments, "--json", check=False, timeout_s=90)
    document = json.loads(done.stdout)
    assert done.returncode == (1 if document["counts"]["problem"] else 0), done.stderr
    if expect is not None:
        assert done.returncode == expect, document
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in document["findings"]:
        assert set(finding) == {"name", "level", "what", "why", "mend"}
        found.setdefault(finding["name"], []).append(finding)
    assert sum(document["counts"].values()) == len(document["findings"])
    return found


def level(found: dict[str, list[dict[str, Any]]], name: str) -> str:
    """Of the one finding of that name."""
    (finding,) = found[name]
    return str(finding["level"])


def write_config(tmp_path: Path, url: str, *, source: str = "", extra: str = "") -> Path:
    path = tmp_path / "mount.toml"
    path.write_text(
        f'state_dir = "{tmp_path}/state"\n[source]\nurl = "{url}"\ntimeout = "2s"\n{source}\n'
        f'[warm]\npath = "{tmp_path}/warm"\ncapacity = "64MiB"\n{extra}'
    )
    return path


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    root.mkdir()
    (root / "m.bin").write_bytes(os.urandom(1 << 20))
    return root


def test_the_machine_alone_is_looked_at_without_a_configuration() -> None:
    found = examined()
    assert level(found, "configuration.valid") == "note"
    assert "doctor.no_answer" not in found
    for name in ("fuse.device", "channel.program", "limits.open_files", "memory.budget"):
        assert name in found


def test_a_configuration_that_is_right_gets_a_look_at_all_it_names(
    tmp_path: Path, models: Path, serve: MakeServe
) -> None:
    config = write_config(tmp_path, serve(models).url)

    def files() -> list[Path]:
        return sorted(path for path in tmp_path.rglob("*") if "serve0" not in path.parts)  # the server goes on

    before = files()
    found = examined(config, "--measure")
    assert files() == before, "nothing was made"
    assert level(found, "source.reachable") == "ok"
    assert level(found, "tier.directory") == "ok"
    assert found["speed.warm"] and found["tier.file_system"]
    assert "doctor.no_answer" not in found


@pytest.mark.skipif(not can_break(), reason="needs root, losetup and mkfs.ext4")
def test_a_warm_tier_on_a_loop_device_is_told_with_what_lies_below_it(tmp_path: Path, models: Path) -> None:
    disk = Disk(tmp_path / "loop")
    try:
        config = write_config(tmp_path, f"dir:{models}")
        config.write_text(config.read_text().replace(f"{tmp_path}/warm", f"{disk.path}/warm"))
        found = examined(config)
        table = Path("/proc/self/mountinfo").read_text().splitlines()
        (name,) = [line.split(" /dev/")[1].split()[0] for line in table if f" {disk.path} " in line]
        read_ahead = int(Path(f"/sys/block/{name}/queue/read_ahead_kb").read_text())
    finally:
        disk.close()
    told = [finding for names in ("storage.layers", "storage.disk") for finding in found.get(names, [])]
    assert [finding for finding in told if name in finding["what"] and finding["level"] == "warning"], told
    (ahead,) = [finding for finding in found["storage.read_ahead"] if name in finding["what"]]
    assert (ahead["level"] == "ok") == (read_ahead >= 1024)
    assert ahead["level"] == "ok" or f"/sys/block/{name}/queue/read_ahead_kb" in ahead["mend"]
    if "storage.layers" in found:  # the image lies on a disk that can be told
        (layers,) = found["storage.layers"]
        assert str(disk.image) in layers["what"] and f"losetup --direct-io=on /dev/{name}" in layers["mend"]
    assert "storage.queue" in found


def test_the_text_has_a_line_for_what_why_and_mend(tmp_path: Path) -> None:
    config = write_config(tmp_path, f"dir:{tmp_path}/nowhere")
    done = tierfs("doctor", config, check=False, timeout_s=90)
    assert done.returncode == 1 and done.stderr.startswith("tierfs: ") and len(done.stderr.splitlines()) == 1
    lines = done.stdout.splitlines()
    (number,) = [n for n, line in enumerate(lines) if line.startswith("problem") and "nowhere" in line]
    assert lines[number + 1].split()[0] == "why" and lines[number + 2].split()[0] == "mend"
    assert "problem" in lines[-1] and "ok" in lines[-1]


def test_a_wrong_configuration_is_a_problem_with_its_key(tmp_path: Path) -> None:
    found = examined(write_config(tmp_path, "dir:/tmp", extra="[mount]\nmaxbackground = 3\n"), expect=1)
    assert "mount.maxbackground" in found["configuration.valid"][0]["what"]
    assert "fuse.device" in found, "the machine is looked at all the same"


def test_a_wrong_token_and_a_wrong_export_are_told_apart_and_no_token_is_shown(
    tmp_path: Path, models: Path, serve: MakeServe
) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"the-{name}-secret")
    url = serve(models, "--token-file", str(tmp_path / "right")).url

    def with_token(name: str, export: str = "") -> dict[str, list[dict[str, Any]]]:
        config = write_config(tmp_path, f"{url}{export}", source=f'token_file = "{tmp_path}/{name}"')
        found = examined(config)
        assert "secret" not in json.dumps(found)
        return found

    assert level(with_token("right"), "source.reachable") == "ok"
    assert level(with_token("wrong"), "source.token") == "problem"
    assert level(with_token("right", export="other"), "source.export") == "problem"


def test_a_server_that_says_nothing_and_one_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        config = write_config(tmp_path, f"tierfs://127.0.0.1:{silent.getsockname()[1]}/")
        started_s = time.monotonic()
        assert level(examined(config, expect=1), "source.reachable") == "problem"
        assert time.monotonic() - started_s < 60
    assert level(examined(config, expect=1), "source.reachable") == "problem"


@pytest.mark.fuse
def test_a_mount_that_is_up_is_asked_and_a_stopped_or_dead_one_is_found(
    tmp_path: Path, models: Path, serve: MakeServe, mount: MakeMount
) -> None:
    mounted = mount(serve(models).url, warm=f'path = "{tmp_path}/warm"\ncapacity = "64MiB"')
    config = mounted.config

    def about(name: str) -> list[dict[str, Any]]:
        return [one for one in examined(config).get(name, []) if str(mounted.path) in one["what"]]

    assert about("mount.answers")
    os.kill(mounted.pid, signal.SIGSTOP)
    try:
        assert about("mount.silent"), "a stopped daemon is no reason to hang"
    finally:
        os.kill(mounted.pid, signal.SIGCONT)
    os.kill(mounted.pid, signal.SIGKILL)
    eventually(lambda: bool(about("mount.dead")), "the killed daemon is found", within_s=60)


@pytest.mark.fuse
@pytest.mark.slow
def test_a_file_system_that_hangs_is_a_finding_and_no_reason_to_hang(
    tmp_path: Path, models: Path, serve: MakeServe, mount: MakeMount
) -> None:
    hanging = mount(serve(models).url)
    config = tmp_path / "hangs.toml"
    text = (
        f'state_dir = "{tmp_path}/state"\n[source]\nurl = "dir:{models}"\n[warm]\npath = "{hanging.path}/below/warm"\n'
    )
    config.write_text(text)
    os.kill(hanging.pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        found = examined(config, expect=1)
        assert time.monotonic() - started_s < 60
        assert "no answer" in found["configuration.valid"][0]["what"]
        config.write_text(text + 'capacity = "1GiB"\n')  # nothing needs to be measured to load it
        found = examined(config, expect=1)
        assert any("tiers: no answer" in one["what"] for one in found["doctor.no_answer"])
        assert "fuse.device" in found, "the other subjects count"
    finally:
        os.kill(hanging.pid, signal.SIGCONT)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
def test_it_works_without_rights(tmp_path: Path) -> None:
    import sys

    from tests.integration.processes import ENVIRONMENT

    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all",
         sys.executable, "-m", "tierfs.cli.main", "doctor", "--json"],
        capture_output=True, text=True, timeout=90, cwd="/",
        env={**ENVIRONMENT, "TIERFS_RUNTIME_DIR": "", "XDG_RUNTIME_DIR": "", "TMPDIR": "/tmp"},
    )  # fmt: skip
    if "No module named" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"another user cannot read this interpreter: {done.stderr.strip()[-200:]}")
    names = {finding["name"] for finding in json.loads(done.stdout)["findings"]}
    assert "passthrough.rights" in names and "doctor.no_answer" not in names

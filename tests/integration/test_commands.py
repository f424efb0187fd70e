"""The commands: what they say, and their exit statuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.processes import ENVIRONMENT, ROOT, Mount, Serve, drop_caches, eventually, tierfs

pytestmark = pytest.mark.fuse

MakeServe = Callable[..., Serve]
MakeMount = Callable[..., Mount]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "model.bin").write_bytes(os.urandom(5 << 20))
    return root


def refusal(*arguments: object) -> str:
    """The one line on stderr of a command that must fail."""
    done = tierfs(*arguments, check=False)
    assert done.returncode != 0, done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("tierfs: "), done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[source]\nurl = "dir:/tmp"\n[warm]\npaht = "/x"\n', ["warm.paht", "warm.path"]),
        ('[source]\nurl = "dir:/tmp"\n[warm]\npath = "/x"\ncapacity = "lots"\n', ["warm.capacity", "lots"]),
        ('[source]\nurl = "http://host/x"\n', ["source.url", "tierfs://"]),
        ("[warm]\npath = '/x'\n", ["source"]),
        ("[source\n", ["TOML"]),
    ],
)
def test_a_mistake_in_the_configuration_is_one_line_with_file_and_key(
    tmp_path: Path, text: str, said: list[str]
) -> None:
    config = tmp_path / "bad.toml"
    config.write_text(text)
    (tmp_path / "mnt").mkdir()
    line = refusal("mount", config, tmp_path / "mnt")
    assert str(config) in line
    for part in said:
        assert part in line


def test_a_place_that_cannot_be_a_mountpoint_is_refused(tmp_path: Path, models: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        f'state_dir = "{tmp_path}/state"\n[source]\nurl = "dir:{models}"\n[warm]\npath = "{tmp_path}/mnt/w"\n'
    )
    assert "mkdir" in refusal("mount", config, tmp_path / "missing")
    (tmp_path / "mnt").mkdir()
    assert "inside the mountpoint" in refusal("mount", config, tmp_path / "mnt")
    inside = tmp_path / "inside.toml"
    inside.write_text(f'state_dir = "{tmp_path}/mnt/state"\n[source]\nurl = "dir:{models}"\n')
    assert "wait for itself" in refusal("mount", inside, tmp_path / "mnt")
    assert "no tierfs is mounted" in refusal("unmount", "/proc")
    assert "no tierfs is mounted" in refusal("unmount", tmp_path / "mnt")
    assert "not in a tierfs mount" in refusal("status", tmp_path)


def test_a_mountpoint_may_be_a_symlink(tmp_path: Path, models: Path, serve: MakeServe, mount: MakeMount) -> None:
    mounted = mount(serve(models).url)
    mounted.unmount()
    link = tmp_path / "link"
    link.symlink_to(mounted.path)
    tierfs("mount", mounted.config, link)
    mounted.pid = int(mounted.status()["daemon"]["pid"])
    assert (link / "m" / "model.bin").stat().st_size == 5 << 20
    tierfs("unmount", link)
    assert not (mounted.path / "m").exists()


def test_a_directory_source_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'state_dir = "{tmp_path}/s"\n[source]\nurl = "dir:{tmp_path}/nope"\n')
    (tmp_path / "mnt").mkdir()
    assert f"{tmp_path}/nope is not there" in refusal("mount", config, tmp_path / "mnt")


def test_a_mount_without_its_source_says_so(models: Path, serve: MakeServe, mount: MakeMount) -> None:
    server = serve(models)
    mounted = mount(server.url, timeout="1s")
    mounted.unmount()
    server.kill()
    said = tierfs("mount", mounted.config, mounted.path).stderr
    assert "mounted, but" in said and "refused" in said
    mounted.pid = int(mounted.status()["daemon"]["pid"])


def test_warm_says_what_is_really_there(tmp_path: Path, models: Path, serve: MakeServe, mount: MakeMount) -> None:
    (models / "n").mkdir()
    (models / "n" / "model.bin").write_bytes(os.urandom(40 << 20))
    mounted = mount(serve(models).url, warm=f'path = "{tmp_path}/warm"\ncapacity = "44MiB"')
    for model in ("m", "n", "m", "n"):
        done = tierfs("warm", mounted.path / model, check=False)
        (answer,) = json.loads(tierfs("where", mounted.path / model, "--json").stdout)
        assert (done.returncode == 0) == (answer["missing_bytes"] == 0), (done, answer)


def test_an_unreachable_source_is_named(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'state_dir = "{tmp_path}/s"\n[source]\nurl = "tierfs://127.0.0.1:1/"\ntimeout = "1s"\n')
    (tmp_path / "mnt").mkdir()
    line = refusal("mount", config, tmp_path / "mnt")
    assert "127.0.0.1:1" in line and "refused" in line


def test_mounting_twice_is_refused_and_harms_nothing(models: Path, serve: MakeServe, mount: MakeMount) -> None:
    mounted = mount(serve(models).url)
    assert f"already mounted by the daemon with pid {mounted.pid}" in refusal("mount", mounted.config, mounted.path)
    assert (mounted.path / "m" / "model.bin").read_bytes() == (models / "m" / "model.bin").read_bytes()


def test_an_export_without_a_token_is_not_shown_to_other_machines(tmp_path: Path, models: Path) -> None:
    line = refusal("serve", models, "--listen", "tcp://0.0.0.0:0", "--state-dir", tmp_path / "s")
    assert "token" in line


def test_the_token_decides(tmp_path: Path, models: Path, serve: MakeServe, mount: MakeMount) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("correct horse\n")
    wrong.write_text("battery staple\n")
    server = serve(models, "--token-file", str(right))
    with pytest.raises(AssertionError, match=r"(?i)token"):
        mount(server.url, token_file=str(wrong))
    mounted = mount(server.url, token_file=str(right))
    assert (mounted.path / "m" / "model.bin").stat().st_size == 5 << 20
    assert "correct horse" not in mounted.log() + server.log.read_text()


def test_warm_where_and_check_agree(tmp_path: Path, models: Path, serve: MakeServe, mount: MakeMount) -> None:
    mounted = mount(serve(models).url, warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"')
    assert tierfs("warm", mounted.path / "m", "--check", check=False).returncode == 1
    assert "5MiB resident" in tierfs("warm", mounted.path / "m").stdout
    assert tierfs("warm", mounted.path / "m", "--check").returncode == 0
    (answer,) = json.loads(tierfs("where", mounted.path / "m", "--json").stdout)
    assert (answer["bytes"], answer["tiers"]["warm"], answer["missing_bytes"]) == (5 << 20, 5 << 20, 0)
    assert "hot" in refusal("warm", mounted.path / "m", "--tier", "hot").lower()
    assert "no such path" in refusal("where", mounted.path / "nope")


def test_status_has_the_documented_keys(models: Path, serve: MakeServe, mount: MakeMount, tmp_path: Path) -> None:
    mounted = mount(serve(models).url, warm=f'path = "{tmp_path}/warm"\ncapacity = "1GiB"')
    status = mounted.status()
    assert status["daemon"]["pid"] == mounted.pid
    assert (status["mode"], bool(status["mode_reason"])) == ("direct", True)
    assert {"state", "fetched_bytes"} <= status["source"].keys()
    tier = {"used_bytes", "capacity_bytes", "hit_blocks", "evicted_blocks", "corrupt_blocks"}
    assert tier <= status["tiers"]["warm"].keys()
    assert {"limit_bytes", "used_bytes"} <= status["memory"].keys()
    assert {"read_ahead_bytes", "max_background", "passthrough"} <= status["kernel"].keys()
    assert {"path", "bytes", "resident_bytes", "eta_s"} <= status["models"][0].keys()
    assert status["oldest_request_s"] == 0
    document = (ROOT / "docs" / "STATUS.md").read_text()
    for key in (*status, *status["source"], *status["tiers"]["warm"], *status["memory"], *status["kernel"]):
        assert f"`{key}`" in document or f".{key}`" in document or f"{key}" in document, key


def test_kernel_limits_are_applied_and_told(models: Path, serve: MakeServe, mount: MakeMount) -> None:
    mounted = mount(serve(models).url, options='read_ahead = "2MiB"\nmax_background = 33\n')
    kernel = mounted.status()["kernel"]
    assert (kernel["read_ahead_bytes"], kernel["max_background"], kernel["notes"]) == (2 << 20, 33, [])
    line = next(x for x in Path("/proc/self/mountinfo").read_text().splitlines() if f" {mounted.path} " in x)
    assert Path(f"/sys/class/bdi/{line.split()[2]}/read_ahead_kb").read_text().strip() == "2048"


def test_owner_is_the_configured_one(models: Path, serve: MakeServe, mount: MakeMount) -> None:
    mounted = mount(serve(models).url, options="uid = 1234\ngid = 4321\n")
    status = (mounted.path / "m" / "model.bin").stat()
    assert (status.st_uid, status.st_gid) == (1234, 4321)


def test_inode_numbers_survive_a_restart_of_daemon_and_server(models: Path, serve: MakeServe, mount: MakeMount) -> None:
    for number in range(200):
        (models / "m" / f"{number}").write_text("x")
    server = serve(models)
    mounted = mount(server.url)
    before = {entry.name: entry.inode() for entry in os.scandir(mounted.path / "m")}
    mounted.unmount()
    server.kill()
    server.start()
    mounted.mount()
    assert {entry.name: entry.inode() for entry in os.scandir(mounted.path / "m")} == before


def test_opening_again_reads_nothing_again(models: Path, serve: MakeServe, mount: MakeMount) -> None:
    mounted = mount(serve(models).url)
    path = mounted.path / "m" / "model.bin"
    path.read_bytes()
    reads = mounted.status()["requests"]["reads"]
    for _ in range(3):
        path.read_bytes()
    assert mounted.status()["requests"]["reads"] == reads
    drop_caches()
    path.read_bytes()
    assert mounted.status()["requests"]["reads"] > reads


def test_the_mount_helper_takes_what_fstab_lines_have(models: Path, serve: MakeServe, mount: MakeMount) -> None:
    mounted = mount(serve(models).url)
    mounted.unmount()
    helper = ROOT / "mount-helpers" / "mount.tierfs"
    directory = mounted.work / "bin"
    directory.mkdir()
    (directory / "tierfs").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tierfs.cli.main "$@"\n')
    (directory / "tierfs").chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{directory}:{os.environ['PATH']}"}
    options = "defaults,ro,nofail,_netdev,noauto,user,x-systemd.mount-timeout=30,allow_other"
    done = subprocess.run(
        [helper, mounted.config, mounted.path, "-o", options], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (mounted.path / "m" / "model.bin").stat().st_size == 5 << 20
    mounted.pid = int(mounted.status()["daemon"]["pid"])
    refused = subprocess.run(
        [helper, mounted.config, mounted.path, "-o", "ro,cache=yes"], env=environment, capture_output=True, text=True
    )
    assert refused.returncode == 1 and "'cache=yes'" in refused.stderr


def test_a_large_directory_is_listed_whole_by_several_readers_while_it_changes(
    tmp_path: Path, serve: MakeServe, mount: MakeMount
) -> None:
    root = tmp_path / "models"
    (root / "many").mkdir(parents=True)
    names = {f"shard-{number:06d}.bin" for number in range(20_000)}
    for name in names:
        (root / "many" / name).touch()
    mounted = mount(serve(root, "--set", "exports..rescan=200ms").url)
    readers = [
        subprocess.Popen(["ls", "-lU", mounted.path / "many"], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    (root / "many" / "new").touch()
    for reader in readers:
        out, _ = reader.communicate(timeout=60)
        listed = [line.split()[-1] for line in out.splitlines()[1:]]
        assert len(listed) == len(set(listed))
        assert set(listed) - {"new"} == names
    eventually((mounted.path / "many" / "new").exists, "the new name")

"""What users without rights can do beside a server and a mount for everybody: read what the modes allow them."""

import os
import pickle
import shutil
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.namespaces import NOBODY
from tests.integration.processes import ENVIRONMENT, Mount, Serve, eventually, tierfs

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users: needs root"),
]

GROUP = 54321
BYTES = 70_000


def as_user(action: Callable[[], object], *, groups: tuple[int, ...] = ()) -> object:
    """What that returns for uid and gid 65534 with these further groups; of an OSError the name of its class."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            os.setgroups(groups)
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            try:
                answer = action()
            except OSError as error:
                answer = type(error).__name__
            os.write(send, pickle.dumps(answer))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that every user may enter, as those of pytest may not."""
    directory = Path(tempfile.mkdtemp(prefix="tierfs-users-"))
    directory.chmod(0o755)
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_RUNTIME_DIR", str(directory / "run"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def tmp_path(place: Path) -> Path:
    """The fixtures that serve and mount work there, too."""
    return place


@pytest.fixture
def models(place: Path) -> Path:
    root = place / "hidden" / "models"
    (place / "hidden").mkdir(mode=0o700)  # nobody reaches the source beside the mount
    for directory, mode in (("", 0o755), ("open", 0o755), ("closed", 0o750), ("through", 0o711), ("private", 0o700)):
        (root / directory).mkdir(exist_ok=True)
        for name, file_mode in (("public", 0o644), ("group", 0o640), ("own", 0o600), ("none", 0o000)):
            path = root / directory / name
            path.write_bytes(os.urandom(BYTES))
            path.chmod(file_mode)
        (root / directory).chmod(mode)
    return root


def allowed(mode: int, *, in_group: bool) -> bool:
    return bool(mode & (0o040 if in_group else 0o004))


@pytest.mark.parametrize("kind", [pytest.param("direct", marks=pytest.mark.long), "channel"])
def test_modes_hold_for_every_other_user(
    place: Path, models: Path, serve: Callable[..., Serve], mount: Callable[..., Mount], kind: str
) -> None:
    server = serve(models)
    warm = place / "warm"
    warm.mkdir(mode=0o755)  # as an administrator makes one
    mounted = mount(
        server.url, warm=f'path = "{warm}"', mode=kind,
        options=f"allow_other = true\nuid = 0\ngid = {GROUP}\nmetadata_ttl = \"1s\"\n",
    )  # fmt: skip
    mounted.work.chmod(0o755)
    mounted.path.parent.chmod(0o755)
    root = mounted.path
    tierfs("warm", root)
    whole = {
        path.relative_to(models): path.read_bytes()  # root may read everything; now the kernel has it, too
        for path in sorted(models.rglob("*")) if path.is_file()
    }  # fmt: skip
    assert all((root / name).read_bytes() == data for name, data in whole.items())

    for groups in ((), (GROUP,)):
        in_group = bool(groups)
        for name, data in whole.items():
            path, parent = root / name, (models / name).parent
            passable = bool(parent.stat().st_mode & (0o010 if in_group else 0o001))
            readable = passable and allowed((models / name).stat().st_mode, in_group=in_group)
            expected: object = data if readable else "PermissionError"
            assert as_user(path.read_bytes, groups=groups) == expected, (name, groups)
            assert as_user(lambda path=path: os.access(path, os.R_OK), groups=groups) is readable
            attribute = as_user(lambda path=path: os.getxattr(path, "user.tierfs.resident"), groups=groups)
            assert isinstance(attribute, bytes) is readable, (name, attribute)
            for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
                assert as_user(lambda path=path, flags=flags: os.open(path, flags), groups=groups) in (
                    "PermissionError", "OSError",
                )  # fmt: skip
        for directory in ("open", "closed", "through", "private"):
            mode = (models / directory).stat().st_mode
            listed = as_user(lambda d=directory: sorted(os.listdir(root / d)), groups=groups)
            may = bool(mode & (0o040 if in_group else 0o004))
            assert listed == (["group", "none", "own", "public"] if may else "PermissionError"), (directory, groups)

    # What was readable is no longer, soon after its mode at the source changed.
    (models / "open" / "public").chmod(0o600)
    eventually(lambda: as_user((root / "open" / "public").read_bytes) == "PermissionError", "the new mode holds")
    _nothing_beside_the_mount(place, mounted, server)
    _no_command(mounted)


def _nothing_beside_the_mount(place: Path, mounted: Mount, server: Serve) -> None:
    """No file of the cache, the states and the logs can be read, and no directory with models' names be listed."""

    def tries(path: Path) -> object:
        return path.read_bytes() if path.is_file() else os.listdir(path)

    seen = 0
    for directory in (place / "warm", mounted.work / "state", place / "serve0" / "serve-state", place / "run"):
        for path in (p for p in sorted(directory.rglob("*")) if p.is_file() or p.name in ("objects", "exports")):
            seen += 1
            assert as_user(lambda path=path: tries(path)) == "PermissionError", path
    assert seen > 8
    assert all(not path.stat().st_mode & 0o077 for path in place.rglob("*.db*"))
    assert server.process.poll() is None


def _no_command(mounted: Mount) -> None:
    """Neither through the control socket, also where its directory could be passed, nor the mount, nor signals."""
    control = next(Path(ENVIRONMENT["TIERFS_RUNTIME_DIR"]).glob("*.sock"))

    def ask() -> object:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(control))
            return "connected"

    assert as_user(ask) == "PermissionError"
    control.parent.chmod(0o711)
    try:
        assert as_user(ask) == "PermissionError"
        assert as_user(control.unlink) == "PermissionError"
        assert as_user(lambda: control.with_suffix(".json").read_text()) == "PermissionError"
    finally:
        control.parent.chmod(0o700)
    for pid in filter(None, (mounted.pid, mounted.channel_pid)):
        assert as_user(lambda pid=pid: os.kill(pid, 15)) == "PermissionError"
        assert as_user(lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes()) == "PermissionError"
        assert as_user(lambda pid=pid: os.listdir(f"/proc/{pid}/fd")) == "PermissionError"
    assert mounted.status()["daemon"]["pid"] == mounted.pid


@pytest.mark.long
def test_a_mount_for_its_owner_alone_shows_nothing_to_others(
    place: Path, models: Path, mount: Callable[..., Mount]
) -> None:
    mounted = mount(f"dir:{models}", mode="channel", options="allow_other = false\n")
    mounted.work.chmod(0o755)
    assert (mounted.path / "public").read_bytes() == (models / "public").read_bytes()
    for action in (lambda: os.listdir(mounted.path), (mounted.path / "public").read_bytes, mounted.path.stat):
        assert as_user(action) == "PermissionError"

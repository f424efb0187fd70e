"""A token is seen in no log, process list, error or report: in good runs, refused ones and crashes."""

import base64
import os
import signal
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.integration.authority import Authority
from tests.integration.processes import ENVIRONMENT, Mount, Serve, eventually, runs, tierfs

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(240)]

TOKEN = "token-nobody-may-see-8152"
WRONG = "wrong-one-is-no-less-secret-77"
# As it is, and as a library might write it.
SHAPES = [
    shape
    for token in (TOKEN, WRONG)
    for shape in (token, token.encode().hex(), base64.b64encode(token.encode()).decode().rstrip("=")[:-1], token[:12])
]


class Seen:
    """Everything that somebody could read, by where it was."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add(self, where: str, text: str) -> None:
        assert text, f"{where} is empty: nothing was looked at"
        self.texts[where] = self.texts.get(where, "") + text

    def command(self, *words: object, status: Iterable[int] = (0,), timeout_s: float = 100) -> str:
        """Run a command to its end, and keep what it said."""
        done = tierfs(*words, check=False, timeout_s=timeout_s)
        assert done.returncode in status, done.stderr
        self.add(f"tierfs {words[0]}", done.stdout + done.stderr)
        return done.stderr

    def process(self, *pids: int) -> None:
        """What /proc shows of these and of each thread."""
        for pid in filter(None, pids):
            for name in ("cmdline", "environ", "comm"):
                self.add(f"/proc/{pid}/{name}", Path(f"/proc/{pid}/{name}").read_text(errors="replace"))

    def files(self, *directories: Path) -> None:
        """Logs and states: all that there is."""
        for directory in directories:
            for path in sorted(directory.rglob("*")):
                if path.is_file() and path.stat().st_size:
                    self.add(str(path), path.read_bytes().decode(errors="replace"))

    def never(self) -> None:
        found = [where for where, text in self.texts.items() for shape in SHAPES if shape.lower() in text.lower()]
        assert not found, f"the token is in {found}"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.bin").write_bytes(os.urandom(3 << 20))
    return tmp_path / "models"


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[Path, Path]:
    """Files with the right one and a wrong one, for their owner alone."""
    paths = tmp_path / "secrets" / "right", tmp_path / "secrets" / "wrong"
    paths[0].parent.mkdir(mode=0o700)
    for path, token in zip(paths, (TOKEN, WRONG), strict=True):
        path.touch(mode=0o600)
        path.write_text(token + "\n")
    return paths


def settings(work: Path, name: str, source: str) -> Path:
    """A configuration for a mount that will not be."""
    path = work / name
    path.write_text(f'state_dir = "{work}/state-{name}"\n[log]\nlevel = "debug"\n[source]\ntimeout = "2s"\n{source}')
    return path


@pytest.mark.parametrize("kind", ["channel", pytest.param("direct", marks=pytest.mark.long)])
def test_no_run_shows_the_token(
    tmp_path: Path,
    models: Path,
    tokens: tuple[Path, Path],
    serve: Callable[..., Serve],
    mount: Callable[..., Mount],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TIERFS_RUNTIME_DIR", str(tmp_path / "run"))
    right, wrong = tokens
    seen = Seen()
    authority = Authority(tmp_path / "authority")
    server = serve(models, "--token-file", str(right), *authority.issue().options, "--set", "log.level=debug")
    tls = f'tls = true\ntls_ca_file = "{authority.ca}"\n'

    # A good run: every command, the figures, the processes.
    mounted = mount(
        server.url, warm=f'path = "{tmp_path}/warm"', token_file=str(right), source=tls, mode=kind,
        extra=f'[log]\nlevel = "debug"\n[metrics]\nlisten = "unix:{tmp_path}/metrics.sock"\n',
    )  # fmt: skip
    assert len((mounted.path / "model.bin").read_bytes()) == 3 << 20
    for words in (("status", mounted.path), ("status", mounted.path, "--json"), ("where", mounted.path),
                  ("report", mounted.path, "--json"), ("top", mounted.path, "--count", "1", "--json")):  # fmt: skip
        seen.command(*words)
    seen.command("doctor", mounted.config, "--json", status=(0, 1))
    eventually((tmp_path / "metrics.sock").exists, "the figures can be had")
    with socket.socket(socket.AF_UNIX) as scraper:
        scraper.connect(str(tmp_path / "metrics.sock"))
        scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        with scraper.makefile("rb") as page:
            seen.add("/metrics", page.read().decode())
    seen.process(server.process.pid, mounted.pid, mounted.channel_pid)

    # Refused: a wrong token, no token, a certificate of somebody else, no TLS, a token in the wrong place.
    (tmp_path / "mnt").mkdir()
    another = Authority(tmp_path / "another").ca
    for name, source, said in (
        ("wrong", f'url = "{server.url}"\ntoken_file = "{wrong}"\n{tls}', "token"),
        ("none", f'url = "{server.url}"\n{tls}', "token"),
        ("ca", f'url = "{server.url}"\ntoken_file = "{right}"\ntls = true\ntls_ca_file = "{another}"\n', "certificate"),
        ("plain", f'url = "{server.url}"\ntoken_file = "{right}"\n', "tls"),
        ("inline", f'url = "{server.url}"\ntoken = "{TOKEN}"\n', "token"),
    ):
        config = settings(tmp_path, name, source)
        assert said in seen.command("mount", config, tmp_path / "mnt", status=(1,)), name
    seen.command("doctor", tmp_path / "wrong", "--json", status=(1,))

    # Crashes, while both have just used it.
    os.kill(mounted.pid, signal.SIGSEGV)
    eventually(lambda: not runs(mounted.pid), "the daemon is gone")
    if kind == "channel":
        # Which no cache of the kernel has: answered by the daemon that follows.
        assert not (mounted.path / "not-there").exists()
        mounted.pid = mounted.status()["daemon"]["pid"]
        seen.process(mounted.pid)
    server.process.send_signal(signal.SIGSEGV)
    assert server.process.wait(20) == -signal.SIGSEGV

    seen.files(mounted.work / "state", tmp_path / "run", tmp_path / "serve0", *tmp_path.glob("state-*"))
    log = seen.texts[str(server.log)]
    assert "wrong token" in log and "TLS handshake failed" in log
    assert mounted.log()
    assert any(str(right) in text for text in seen.texts.values()), "where the token lies is no secret, and seen"
    seen.never()


def test_a_traceback_has_no_values(tmp_path: Path, models: Path, tokens: tuple[Path, Path]) -> None:
    """Where an error is nobody's expectation, the log has the stack, without what its variables hold."""
    ready = tmp_path / "not-there" / "ready"  # cannot be written: a bug to the server
    done = tierfs(
        "serve", models, "--listen", "tcp://127.0.0.1:0", "--token-file", tokens[0], "--ready-file", ready,
        "--state-dir", tmp_path / "state", check=False,
    )  # fmt: skip
    assert done.returncode != 0 and done.stderr
    assert not any(shape.lower() in (done.stdout + done.stderr).lower() for shape in SHAPES)

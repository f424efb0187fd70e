"""source.transport on a real mount, where the loopback address has no RDMA device: what is chosen, and what is said."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.processes import Mount, Serve, eventually, tierfs

pytestmark = pytest.mark.fuse

NO_DEVICE = ("there is no RDMA device here", "no RDMA device has 127.0.0.1")
MakeServe = Callable[..., Serve]
MakeMount = Callable[..., Mount]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    root.mkdir()
    (root / "model.bin").write_bytes(bytes(range(256)) * 40_000)
    return root


@contextmanager
def configured(url: str, work: Path, transport: str) -> Iterator[Mount]:
    """A mount that is not made yet, and is gone afterwards."""
    work.mkdir()
    mounted = Mount(url, work)
    text = mounted.config.read_text()
    mounted.config.write_text(text.replace("[source]\n", f'[source]\ntransport = "{transport}"\n'))
    try:
        yield mounted
    finally:
        mounted.cleanup()


def test_auto_goes_over_tcp_at_once_and_says_why(models: Path, serve: MakeServe, mount: MakeMount) -> None:
    mounted = mount(serve(models).url)
    assert (mounted.path / "model.bin").read_bytes() == (models / "model.bin").read_bytes()
    eventually(lambda: "RDMA device" in mounted.status()["source"]["transport_reason"], "the reason is there")
    source = mounted.status()["source"]
    assert (source["transport"], source["device"], source["rdma_blocks"]) == ("tcp", "", 0)
    assert source["transport_reason"].startswith(NO_DEVICE)
    assert "not by RDMA: " in tierfs("status", mounted.path).stdout
    assert "rdma_not_used" in mounted.log()


def test_rdma_alone_is_refused_with_the_reason_in_one_line(models: Path, tmp_path: Path, serve: MakeServe) -> None:
    with configured(serve(models).url, tmp_path / "mine", "rdma") as mounted:
        done = tierfs("mount", mounted.config, mounted.path, check=False)
        assert done.returncode != 0
        (line,) = done.stderr.strip().splitlines()
        assert 'source.transport is "rdma", which cannot be used' in line
        assert any(reason in line for reason in NO_DEVICE)


def test_tcp_alone_never_asks_for_rdma(models: Path, tmp_path: Path, serve: MakeServe) -> None:
    with configured(serve(models).url, tmp_path / "mine", "tcp") as mounted:
        mounted.mount()
        source = mounted.status()["source"]
        assert (source["transport"], source["transport_reason"]) == ("tcp", 'source.transport is "tcp"')

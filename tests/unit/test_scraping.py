"""`GET /metrics` over real sockets: what is answered, what is refused, and who cannot hold anybody up."""

import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tierfs.app.places import check_places
from tierfs.blocks.errors import ConfigError, MountFailed
from tierfs.config.addresses import Address, parse_metrics_listen
from tierfs.config.load import load_mount_config
from tierfs.config.schema import MountConfig
from tierfs.control import scraping

LIMIT_S = 30
GOOD = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


class Page:
    """A page that counts how often it was made."""

    def __init__(self) -> None:
        self.made = 0
        self.size_bytes = 10

    def __call__(self) -> bytes:
        self.made += 1
        return b"x" * self.size_bytes


@asynccontextmanager
async def serving(where: Path | Address, page: Callable[[], bytes], deadline_s: float = 60) -> AsyncIterator[str | int]:
    async with trio.open_nursery() as nursery:
        bound = await nursery.start(
            lambda task_status: scraping.serve(
                where, page, content_type="text/x", deadline_s=deadline_s, task_status=task_status
            )
        )
        yield bound
        nursery.cancel_scope.cancel()


async def connect(where: Path | Address) -> trio.SocketStream:
    if isinstance(where, Path):
        stream = await trio.open_unix_socket(os.fspath(where))
    else:
        stream = await trio.open_tcp_stream(where.host, where.port)
    return stream


async def ask(where: Path | Address, request: bytes = GOOD) -> bytes:
    async with await connect(where) as stream:
        await stream.send_all(request)
        return await rest(stream)


async def rest(stream: trio.SocketStream) -> bytes:
    answer = b""
    while more := await stream.receive_some(65536):
        answer += more
    return answer


def run(test: Callable[[], object]) -> None:
    async def limited() -> None:
        with trio.fail_after(LIMIT_S):
            await test()  # type: ignore[misc]

    trio.run(limited)


def test_a_scrape_over_a_unix_socket_that_only_owner_and_group_may_open(tmp_path: Path) -> None:
    where = tmp_path / "metrics.sock"

    async def test() -> None:
        async with serving(where, Page()):
            assert stat.S_IMODE(where.stat().st_mode) == 0o660
            head, _, body = (await ask(where)).partition(b"\r\n\r\n")
            assert head.split(b"\r\n") == [
                b"HTTP/1.1 200 OK", b"Content-Type: text/x", b"Content-Length: 10", b"Connection: close",
            ]  # fmt: skip
            assert body == b"x" * 10
        assert not where.exists()

    run(test)


def test_a_scrape_over_tcp_in_pieces() -> None:
    async def test() -> None:
        async with serving(Address("127.0.0.1", 0), Page()) as bound:
            assert isinstance(bound, Address)
            async with await connect(bound) as stream:
                for piece in (GOOD[:5], GOOD[5:-3], GOOD[-3:]):
                    await stream.send_all(piece)
                    await trio.lowlevel.checkpoint()
                assert (await rest(stream)).startswith(b"HTTP/1.1 200 ")

    run(test)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../x HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics?name=x HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics\r\n\r\n", 400),
        (b"\x00\xff\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20000 + b"\r\n\r\n", 431),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_nothing_else_is_served(tmp_path: Path, request_: bytes, status: int) -> None:
    page = Page()

    async def test() -> None:
        async with serving(Address("127.0.0.1", 0), page) as bound:
            assert isinstance(bound, Address)
            assert (await ask(bound, request_)).startswith(b"HTTP/1.1 %d " % status)
            assert page.made == (status == 200)
            assert (await ask(bound)).startswith(b"HTTP/1.1 200 ")

    run(test)


def test_the_page_is_made_once_however_many_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "s"
    page = Page()
    monkeypatch.setattr(scraping, "_FRESH_S", 1e6)

    async def test() -> None:
        async with serving(where, page):
            for _ in range(20):
                await ask(where)
            assert page.made == 1

    run(test)


def test_who_is_silent_or_does_not_read_is_cut_off(tmp_path: Path) -> None:
    where = tmp_path / "s"
    page = Page()
    page.size_bytes = 64 << 20  # more than any socket's buffer

    async def test() -> None:
        async with serving(where, page, deadline_s=0.3), await connect(where) as slow:
            await slow.send_all(GOOD)
            async with await connect(where) as silent:
                assert await rest(silent) == b""
                # The other one came before it, so its deadline is over as well; it has read nothing until now.
                try:
                    assert len(await rest(slow)) < page.size_bytes
                except trio.BrokenResourceError:
                    pass

    run(test)


def test_of_more_connections_than_a_few_the_oldest_without_a_request_is_closed(tmp_path: Path) -> None:
    where = tmp_path / "s"

    async def test() -> None:
        async with serving(where, Page()):
            waiting = [await connect(where) for _ in range(scraping._CONNECTIONS_MAX)]
            assert (await ask(where)).startswith(b"HTTP/1.1 200 ")
            async with waiting.pop(0) as oldest:
                assert await rest(oldest) == b""
            for stream in waiting:
                await stream.send_all(GOOD)
                assert (await rest(stream)).startswith(b"HTTP/1.1 200 ")
                await stream.aclose()
            assert (await ask(where)).startswith(b"HTTP/1.1 200 ")

    run(test)


def test_a_figure_that_fails_costs_that_scrape_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = tmp_path / "s"
    answers = [b"ok"]

    async def test() -> None:
        def page() -> bytes:
            return answers[0]

        async with serving(where, page):
            answers.clear()
            assert await ask(where) == b""
            answers.append(b"ok")
            assert (await ask(where)).endswith(b"ok")

    run(test)
    assert "metrics_failed_by_bug" in caplog.text


def test_the_socket_of_a_daemon_that_died_is_replaced(tmp_path: Path) -> None:
    where = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(where))

    async def test() -> None:
        async with serving(where, Page()):
            assert (await ask(where)).startswith(b"HTTP/1.1 200 ")

    run(test)


@pytest.mark.parametrize("what", ["file", "process", "directory"])
def test_an_address_that_cannot_be_had_is_told_once_and_had_later(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "d" / "s"
    if what != "directory":
        where.parent.mkdir()
    other = socket.socket(socket.AF_UNIX)
    if what == "file":
        where.write_text("precious")
    if what == "process":
        other.bind(os.fspath(where))
        other.listen(1)
    tries = 0
    sleep = trio.sleep

    async def again(seconds: float) -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            assert what != "file" or where.read_text() == "precious"
            where.parent.mkdir(exist_ok=True)
            where.unlink(missing_ok=True)
        await sleep(0)

    monkeypatch.setattr(scraping.trio, "sleep", again)

    async def test() -> None:
        async with serving(where, Page()):
            assert (await ask(where)).startswith(b"HTTP/1.1 200 ")

    run(test)
    other.close()
    assert tries == 3
    assert caplog.text.count("metrics_unavailable") == 1


def test_the_socket_of_the_daemon_that_follows_is_left_alone(tmp_path: Path) -> None:
    where = tmp_path / "s"

    async def test() -> None:
        async with serving(where, Page()):
            where.rename(tmp_path / "old")
            where.write_text("another")
        assert where.read_text() == "another"

    run(test)


def test_addresses() -> None:
    assert parse_metrics_listen("unix:/run/tierfs/metrics.sock") == Path("/run/tierfs/metrics.sock")
    assert parse_metrics_listen("tcp://127.0.0.1:9464") == Address("127.0.0.1", 9464)
    assert parse_metrics_listen("tcp://[::1]:9464") == Address("::1", 9464)
    for wrong in ("9464", "unix:metrics.sock", "unix:/" + "x" * 107, "tcp://127.0.0.1", "tcp://h:0", "http://h:1", ""):
        with pytest.raises(ConfigError):
            parse_metrics_listen(wrong)


def configured(root: Path, listen: str) -> MountConfig:
    file = root / "mount.toml"
    file.write_text(
        f'state_dir = "{root}/state"\n[source]\nurl = "tierfs://127.0.0.1:1/x"\n[metrics]\nlisten = "{listen}"\n'
    )
    return load_mount_config(file)


def test_a_wrong_address_in_the_configuration_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'metrics\.listen is "tcp://127\.0\.0\.1"; expected "tcp://HOST:PORT"'):
        configured(tmp_path, "tcp://127.0.0.1")
    assert configured(tmp_path, "tcp://127.0.0.1:9464").metrics.listen == "tcp://127.0.0.1:9464"


def test_a_socket_inside_the_mountpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    check_places(configured(tmp_path, f"unix:{tmp_path}/metrics.sock"), str(tmp_path / "mnt"))
    with pytest.raises(MountFailed, match="inside the mountpoint"):
        check_places(configured(tmp_path, f"unix:{tmp_path}/mnt/metrics.sock"), str(tmp_path / "mnt"))

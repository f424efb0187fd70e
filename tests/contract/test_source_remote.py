"""The remote source keeps the promises of tiers/interface.py: against the real server, and against one that misbehaves."""

import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from tests.integration.scripted_server import BLOCK_BYTES as SCRIPT_BLOCK_BYTES
from tests.integration.scripted_server import ENCODED, VERSION, Peer, Script, scripted
from tests.integration.serving import (
    BLOCK_BYTES,
    SECOND_S,
    GatedExport,
    certificate,
    eventually,
    exporting,
    file_of,
    listening,
    pattern,
    read_file,
    running,
    serving,
)
from tierfs.blocks.errors import (
    AuthenticationFailed,
    ConfigError,
    NotFound,
    ProtocolError,
    SourceRefused,
    SourceUnavailable,
    StaleVersion,
)
from tierfs.blocks.ids import VersionId, content_id, digest_block
from tierfs.blocks.spans import Span
from tierfs.tiers.remote import RemoteSource, parse_source_url
from tierfs.wire import messages as m

TOKEN = b"t" * 32
WHOLE = Span(0, 0, SCRIPT_BLOCK_BYTES)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(SECOND_S):
            await main()

    trio.run(bounded)


def remote(url: str, **options: object) -> RemoteSource:
    return RemoteSource(url, jitter=random.Random(1), **options)  # type: ignore[arg-type]  # the options of the test


async def hang(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
    await trio.sleep_forever()


# against the real server


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_byte_arrives_in_its_place(tmp_path: Path, token: bytes | None, host: str) -> None:
    data = pattern(9 * BLOCK_BYTES + 4321)
    (tmp_path / "file").write_bytes(data)

    async def main() -> None:
        async with serving(tmp_path, token=token, host=host) as served:
            url = served.url() if host != "::1" else f"tierfs://[::1]:{served.port}/"
            async with running(remote(url, token=token)) as source:
                assert await read_file(source, await source.publication(), b"file") == data
                statistics = source.statistics()
                assert (statistics.state, statistics.transport) == ("connected", "tcp")
                assert (statistics.fetched_blocks, statistics.fetched_bytes) == (10, len(data))

    run(main)


def test_tls_carries_every_byte_and_an_untrusted_server_is_refused(tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    exported.mkdir()
    data = pattern(9 * BLOCK_BYTES + 1)
    (exported / "file").write_bytes(data)
    server_tls, client_tls = certificate(tmp_path)

    async def main() -> None:
        import ssl

        async with serving(exported, token=TOKEN, tls=server_tls) as served:
            async with running(remote(served.url(), token=TOKEN, tls=client_tls)) as source:
                publication = await source.publication()
                assert await read_file(source, publication, b"file") == data
                await eventually(lambda: served.source.statistics().digested_bytes == len(data))
                assert await read_file(source, publication, b"file") == data, "now from the file, not from memory"
            async with running(remote(served.url(), token=TOKEN, tls=ssl.create_default_context())) as source:
                with pytest.raises(AuthenticationFailed, match="certificate is not trusted"):
                    await source.publication()
            async with running(remote(served.url(), token=TOKEN, connect_timeout_s=1)) as source:
                await eventually(lambda: source.statistics().state == "down")

    run(main)


def test_a_span_and_the_digest_of_its_whole_block(tmp_path: Path) -> None:
    data = pattern(2 * BLOCK_BYTES)
    (tmp_path / "file").write_bytes(data)

    async def main() -> None:
        async with serving(tmp_path) as served, running(remote(served.url())) as source:
            version, _ = file_of(await source.publication(), b"file")
            buffer = bytearray(100)
            digest = await source.read_into(version, Span(1, 50, 100), memoryview(buffer))
            assert buffer == data[BLOCK_BYTES + 50 : BLOCK_BYTES + 150]
            assert digest == digest_block(data[BLOCK_BYTES:])

    run(main)


def test_content_ids_arrive_without_another_catalog_and_new_files_with_one(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1" * 1000)

    async def main() -> None:
        async with serving(tmp_path) as served, running(remote(served.url())) as source:
            first = await source.publication()
            version, size = file_of(first, b"one")
            publication = first
            while version not in publication.contents:
                publication = await source.wait_changed(publication.revision)
                assert publication.catalog is first.catalog
            assert publication.contents[version] == content_id(digest_block(b"1" * 1000), size)

            (tmp_path / "new").write_bytes(b"2")
            os.rename(tmp_path / "new", tmp_path / "two")
            later = publication
            while not any(entry.name == b"two" for entry in later.catalog.entries):
                later = await source.wait_changed(later.revision)
            assert later.revision > publication.revision
            assert later.contents[version] == publication.contents[version], "the content id of a version stays known"

    run(main)


def test_failures_are_told_by_their_kind(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(BLOCK_BYTES))

    async def main() -> None:
        async with serving(tmp_path) as served, running(remote(served.url())) as source:
            version, _ = file_of(await source.publication(), b"file")
            buffer = memoryview(bytearray(BLOCK_BYTES))
            with pytest.raises(StaleVersion):
                await source.read_into(VersionId(b"?" * 16), Span(0, 0, BLOCK_BYTES), buffer)
            with pytest.raises(SourceRefused, match="no block 7"):
                await source.read_into(version, Span(7, 0, BLOCK_BYTES), buffer)
            with pytest.raises(SourceRefused, match="it has"):
                await source.read_into(version, Span(0, 1, BLOCK_BYTES), buffer)
            assert source.statistics().failed_requests == 3
            await source.read_into(version, Span(0, 0, BLOCK_BYTES), buffer)
            assert served.server.statistics().malformed == 0

    run(main)


@pytest.mark.parametrize(
    ("server_token", "client_token", "export", "error", "reason"),
    [
        (TOKEN, b"wrong", "", AuthenticationFailed, "wrong token"),
        (TOKEN, None, "", AuthenticationFailed, "needs a token"),
        (None, TOKEN, "", AuthenticationFailed, "did not prove"),
        (None, None, "elsewhere", NotFound, "no export 'elsewhere'"),
    ],
)
def test_a_server_that_will_not_have_us_is_told_promptly(
    tmp_path: Path, server_token: bytes | None, client_token: bytes | None, export: str, error: type[Exception],
    reason: str,
) -> None:  # fmt: skip
    async def main() -> None:
        async with serving(tmp_path, token=server_token) as served:
            async with running(remote(served.url(export), token=client_token)) as source:
                with pytest.raises(error, match=reason):
                    await source.publication()
                assert source.statistics().state == "down"
                assert reason in source.statistics().reason
                with pytest.raises(SourceRefused, match=reason):
                    await source.read_into(VersionId(VERSION), Span(0, 0, 1), memoryview(bytearray(1)))

    run(main)


def test_a_server_that_comes_later_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")

    async def main() -> None:
        async with serving(tmp_path) as before:
            port = before.port
        async with running(remote(f"tierfs://127.0.0.1:{port}/")) as source:
            await eventually(lambda: source.statistics().state == "down")
            with pytest.raises(SourceUnavailable, match="is down"):
                await source.read_into(VersionId(VERSION), Span(0, 0, 1), memoryview(bytearray(1)))
            async with serving(tmp_path, port=port):
                assert await read_file(source, await source.publication(), b"file") == b"x"

    run(main)


def test_a_restart_in_mid_transfer_fails_at_once_and_the_new_tree_is_noticed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    (old / "file").write_bytes(pattern(BLOCK_BYTES))
    (new / "file").write_bytes(pattern(BLOCK_BYTES, seed=2))

    async def main() -> None:
        async with exporting(old) as old_source, exporting(new) as new_source:
            gated = GatedExport(old_source)
            async with listening({"": gated}) as (_, port), trio.open_nursery() as nursery:
                source = await nursery.start(keep, f"tierfs://127.0.0.1:{port}/")
                first = await source.publication()
                version, _ = file_of(first, b"file")
                outcome = []

                async def read() -> None:
                    with pytest.raises(SourceUnavailable):
                        await source.read_into(version, Span(0, 0, BLOCK_BYTES), memoryview(bytearray(BLOCK_BYTES)))
                    outcome.append("failed")

                nursery.start_soon(read)
                await gated.someone_waits.wait()
                # leaving the block below stops this server; the client goes on in the same nursery
                async with trio.open_nursery() as second:
                    second.start_soon(eventually, lambda: outcome == ["failed"])
                    stop_all(gated, source)
                async with listening({"": new_source}) as (_, other_port):
                    async with running(remote(f"tierfs://127.0.0.1:{other_port}/")) as other:
                        assert await read_file(other, await other.publication(), b"file") == pattern(BLOCK_BYTES, seed=2)
                nursery.cancel_scope.cancel()

    run(main)


async def keep(url: str, *, task_status: "trio.TaskStatus[RemoteSource]") -> None:
    async with running(remote(url)) as source:
        task_status.started(source)
        await trio.sleep_forever()


def stop_all(gated: GatedExport, source: RemoteSource) -> None:
    raise NotImplementedError

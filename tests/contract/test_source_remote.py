"""The remote source keeps the promises of tiers/interface.py: with the real server, and with one that misbehaves."""

import os
import random
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.integration.scripted_server import BLOCK_BYTES as SCRIPT_BLOCK_BYTES
from tests.integration.scripted_server import CATALOG, VERSION, Peer, Script, scripted
from tests.integration.serving import (
    BLOCK_BYTES,
    GatedExport,
    certificate,
    eventually,
    exporting,
    file_of,
    listening,
    pattern,
    read_file,
    run,
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
from tierfs.catalog.schema import Catalog, Entry, Kind, encode
from tierfs.tiers.remote import RemoteSource
from tierfs.wire import messages as m

TOKEN = b"t" * 32
WHOLE = Span(0, 0, SCRIPT_BLOCK_BYTES)


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
        async with (
            serving(tmp_path, token=server_token) as served,
            running(remote(served.url(export), token=client_token)) as source,
        ):
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
    for directory, seed in ((old, 1), (new, 2)):
        directory.mkdir()
        (directory / "file").write_bytes(pattern(BLOCK_BYTES, seed))

    async def main() -> None:
        async with exporting(old) as old_source, exporting(new) as new_source, trio.open_nursery() as nursery:
            gated = GatedExport(old_source)
            failed = trio.Event()
            async with listening({"": gated}) as (_, port):
                source = remote(f"tierfs://127.0.0.1:{port}/", request_timeout_s=1000)
                await nursery.start(source.run)
                publication = await source.publication()
                version, _ = file_of(publication, b"file")

                async def read() -> None:
                    with pytest.raises(SourceUnavailable):
                        await source.read_into(version, Span(0, 0, BLOCK_BYTES), memoryview(bytearray(BLOCK_BYTES)))
                    failed.set()

                nursery.start_soon(read)
                await gated.someone_waits.wait()
            await failed.wait()
            async with listening({"": new_source}, port=port):
                while file_of(publication, b"file")[0] == version:
                    publication = await source.wait_changed(publication.revision)
                assert await read_file(source, publication, b"file") == pattern(BLOCK_BYTES, seed=2)
            nursery.cancel_scope.cancel()

    run(main)


# against a server that misbehaves


def test_another_life_of_the_same_tree_is_noticed_without_its_catalog_again() -> None:
    one, two = Script(hang), Script(hang, boot=b"B" * 16, contents=VERSION + b"c" * 16)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            async with scripted(one) as url:
                source = remote(url)
                await nursery.start(source.run)
                first = await source.publication()
                assert not first.contents
            two.port = one.port
            async with scripted(two):
                later = await source.wait_changed(first.revision)
                assert later.catalog is first.catalog
                assert later.contents == {VERSION: b"c" * 16}
                assert (one.catalogs_sent, two.catalogs_sent) == (1, 0)
            nursery.cancel_scope.cancel()

    run(main)


def test_content_ids_of_files_that_are_not_in_the_catalog_are_not_kept() -> None:
    script = Script(hang, contents=b"".join(bytes([i]) * 32 for i in range(100)) + VERSION + b"c" * 16)

    async def main() -> None:
        async with scripted(script) as url, running(remote(url)) as source:
            assert (await source.publication()).contents == {VERSION: b"c" * 16}

    run(main)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(hang, claimed_bytes=1 << 60), "the limit is"),
        (Script(hang, claimed_bytes=0), "the limit is"),
        (Script(hang, claimed_digest=b"d" * 16), "does not match its digest"),
        (Script(hang, encoded=b"\x93not a catalog"), "not a catalog"),
        (Script(hang, contents=b"odd"), "whole pairs"),
    ],
)
def test_a_publication_that_cannot_be_is_refused(script: Script, reason: str) -> None:
    async def main() -> None:
        async with scripted(script) as url, running(remote(url)) as source:
            with pytest.raises(ProtocolError, match=reason):
                await source.publication()
            assert reason in source.statistics().reason

    run(main)


async def refuse_form(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
    await peer.stream.send_all(b"GARBAGE!" * 8)


async def too_long(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
    await peer.send(m.BlockData(b"d" * 16), request_id, bytes(message.length_bytes + 1))


async def too_short(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
    await peer.send(m.BlockData(b"d" * 16), request_id, bytes(message.length_bytes - 1))


async def somebody_elses(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
    await peer.send(m.BlockData(b"d" * 16), request_id + 1000, bytes(message.length_bytes))


async def reset_in_the_middle(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
    frame = m.encode(m.BlockData(b"d" * 16), request_id=request_id, data_bytes=message.length_bytes)
    await peer.stream.send_all(frame + bytes(1000))
    peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await peer.stream.aclose()


@pytest.mark.parametrize("handler", [refuse_form, too_long, too_short, somebody_elses, reset_in_the_middle])
def test_a_broken_reply_fails_its_request_and_the_source_recovers(
    handler: Callable[[Peer, int, m.ReadBlock], Awaitable[None]],
) -> None:
    broken = True

    async def sometimes(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
        if broken:
            await handler(peer, request_id, message)
        else:
            await peer.send(m.BlockData(b"d" * 16), request_id, b"g" * message.length_bytes)

    script = Script(sometimes)

    async def main() -> None:
        nonlocal broken
        async with scripted(script) as url, running(remote(url, connections=1)) as source:
            await source.publication()
            buffer = bytearray(SCRIPT_BLOCK_BYTES)
            with pytest.raises(SourceUnavailable):
                await source.read_into(VersionId(VERSION), WHOLE, memoryview(buffer))
            before = bytes(buffer)
            broken = False
            await eventually(lambda: source.statistics().state == "down")
            with pytest.raises(SourceUnavailable):  # and not SourceRefused: it is worth trying again
                await source.read_into(VersionId(VERSION), WHOLE, memoryview(bytearray(SCRIPT_BLOCK_BYTES)))
            await eventually(lambda: script.connections == 2 and source.statistics().connections == 1)
            again = bytearray(SCRIPT_BLOCK_BYTES)
            assert await source.read_into(VersionId(VERSION), WHOLE, memoryview(again)) == b"d" * 16
            assert again == b"g" * SCRIPT_BLOCK_BYTES
            assert buffer == before, "a buffer given back was written to"

    run(main)


def test_after_cancellation_the_buffer_is_left_alone_and_the_connection_lives() -> None:
    half_sent, go_on, all_sent = trio.Event(), trio.Event(), trio.Event()
    count = 0

    async def in_two_halves(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
        nonlocal count
        count += 1
        frame = m.encode(m.BlockData(b"d" * 16), request_id=request_id, data_bytes=message.length_bytes)
        await peer.stream.send_all(frame + b"1" * (message.length_bytes // 2))
        if count == 1:
            half_sent.set()
            await go_on.wait()
        await peer.stream.send_all(b"2" * (message.length_bytes // 2))
        all_sent.set()

    script = Script(in_two_halves)

    async def main() -> None:
        async with scripted(script) as url, running(remote(url, connections=1, request_timeout_s=1000)) as source:
            await source.publication()
            buffer = bytearray(SCRIPT_BLOCK_BYTES)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:

                    async def stop() -> None:
                        await half_sent.wait()
                        await eventually(lambda: buffer[SCRIPT_BLOCK_BYTES // 2 - 1] == ord("1"))
                        scope.cancel()

                    nursery.start_soon(stop)
                    await source.read_into(VersionId(VERSION), WHOLE, memoryview(buffer))
            assert scope.cancelled_caught
            before = bytes(buffer)
            go_on.set()
            await all_sent.wait()
            again = bytearray(SCRIPT_BLOCK_BYTES)
            await source.read_into(VersionId(VERSION), WHOLE, memoryview(again))
            half = SCRIPT_BLOCK_BYTES // 2
            assert again == b"1" * half + b"2" * half
            assert buffer == before and b"2" not in buffer
            assert script.connections == 1 and len(script.cancels) == 1

    run(main)


def test_a_request_without_progress_fails_alone_while_others_get_on() -> None:
    async def first_never(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
        if message.block:
            await peer.send(m.BlockData(b"d" * 16), request_id, bytes(message.length_bytes))

    script = Script(first_never)

    async def main() -> None:
        async with scripted(script) as url, running(remote(url, connections=1, request_timeout_s=0.5)) as source:
            await source.publication()
            failed = False

            async def stuck() -> None:
                nonlocal failed
                with pytest.raises(SourceUnavailable, match="no progress"):
                    await source.read_into(VersionId(VERSION), WHOLE, memoryview(bytearray(SCRIPT_BLOCK_BYTES)))
                failed = True

            async with trio.open_nursery() as nursery:
                nursery.start_soon(stuck)
                while not failed:
                    await source.read_into(VersionId(VERSION), Span(1, 0, 1000), memoryview(bytearray(1000)))
            assert script.connections == 1, "a connection that works was given up"

    run(main)


def test_a_silent_server_is_given_up_and_connected_to_again() -> None:
    script = Script(hang)

    async def main() -> None:
        async with scripted(script) as url, running(remote(url, connections=1, request_timeout_s=0.2)) as source:
            await source.publication()
            with pytest.raises(SourceUnavailable, match="no progress"):
                await source.read_into(VersionId(VERSION), WHOLE, memoryview(bytearray(SCRIPT_BLOCK_BYTES)))
            await eventually(lambda: script.connections == 2)

    run(main)


@pytest.mark.parametrize("answers", [True, False])
def test_a_quiet_connection_lives_exactly_as_long_as_its_pings_are_answered(answers: bool) -> None:
    script = Script(hang, idle_timeout_s=1, answers_pings=answers)

    async def main() -> None:
        async with scripted(script) as url, running(remote(url, connections=1)) as source:
            await source.publication()
            if answers:
                await eventually(lambda: script.pings >= 2)
                assert script.connections == 1
            else:
                await eventually(lambda: script.connections == 2)

    run(main)


def test_a_catalog_of_many_parts_arrives_whole() -> None:
    entries = [*CATALOG.entries]
    entries += [Entry(0, b"%06d" % i, Kind.FILE, 0o644, i, i, i.to_bytes(16, "big")) for i in range(150_000)]
    encoded = encode(Catalog("", 1, SCRIPT_BLOCK_BYTES, entries))
    assert len(encoded) > 1.5 * m.CATALOG_PART_LIMIT_BYTES
    script = Script(hang, encoded=encoded)

    async def main() -> None:
        async with scripted(script) as url, running(remote(url)) as source:
            assert (await source.publication()).catalog.entries == entries
            assert script.catalogs_sent == -(-len(encoded) // m.CATALOG_PART_LIMIT_BYTES)
        async with scripted(script) as url, running(remote(url, catalog_limit_bytes=len(encoded) - 1)) as source:
            with pytest.raises(ProtocolError, match="the limit is"):
                await source.publication()

    run(main)


def test_requests_stay_within_what_the_server_takes() -> None:
    release = trio.Event()

    async def count(peer: Peer, request_id: int, message: m.ReadBlock) -> None:
        await release.wait()
        await peer.send(m.BlockData(b"d" * 16), request_id, bytes(message.length_bytes))

    script = Script(count, max_requests=3)

    async def main() -> None:
        async with scripted(script) as url, running(remote(url, connections=2)) as source:
            await source.publication()
            await eventually(lambda: source.statistics().connections == 2)
            done = 0

            async def read(block: int) -> None:
                nonlocal done
                await source.read_into(VersionId(VERSION), Span(block, 0, 100), memoryview(bytearray(100)))
                done += 1

            async with trio.open_nursery() as nursery:
                for block in range(20):
                    nursery.start_soon(read, block)
                await trio.testing.wait_all_tasks_blocked()
                assert source._slots.borrowed_tokens == 6
                assert [link.load for link in source._links] == [3, 3]
                release.set()
            assert done == 20

    run(main)


@pytest.mark.parametrize(
    "url",
    ["http://h/", "tierfs:/h", "tierfs://", "tierfs://h:99999/", "tierfs://h:0/", "tierfs://::1:80/", "tierfs://[h]/",
     "tierfs://u@h/", "tierfs://h/%ff", "tierfs://h/x?y", "tierfs://h/" + "x" * 256, "dir:/srv/models"],
)  # fmt: skip
def test_a_url_that_names_nothing_is_a_mistake_in_the_configuration(url: str) -> None:
    with pytest.raises(ConfigError):
        remote(url)

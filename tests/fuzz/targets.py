"""What is fuzzed: everything that decodes what somebody else sends or writes. Each target takes bytes and returns, or
raises what is a bug; a refusal that the decoder promises is none.

main.py drives them under atheris, test_fuzz.py shortly in every run. Where the unit tests have generators already,
those are targets too: hypothesis makes its choices from the fuzzer's bytes.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.unit import test_catalog_check as catalog_check
from tests.unit import test_channel_messages, test_framing, test_messages
from tests.unit.test_catalog_check import test_damaged_bytes_are_refused_or_make_a_sound_tree as damaged_catalog
from tests.unit.test_catalog_check import test_entries_of_any_values_are_refused_or_make_a_sound_tree as any_entries
from tierfs.blocks.errors import AuthenticationFailed, ConfigError, ProtocolError, TierfsError
from tierfs.catalog import schema
from tierfs.config.load import load_mount_config, load_serve_config
from tierfs.wire import channel
from tierfs.wire import messages as m
from tierfs.wire.connection import PendingRequests
from tierfs.wire.framing import HEADER_BYTES, FrameReader, parse_header
from tierfs.wire.handshake import ClientHandshake, ServerHandshake

Target = Callable[[bytes], object]

_BODY_LIMIT_BYTES = 4096
_WELCOME = m.Welcome(b"", bytes(16), 32, 60, "tierfs", ())
_STRANGE_PATHS = ("/dev/", "/proc/", "/sys/")  # a configuration may name them, and reading them may never end


def server(data: bytes) -> None:
    """A stream from a stranger: cut at every 64 bytes, through the handshake of an export with a token."""
    reader = FrameReader(body_limit_bytes=_BODY_LIMIT_BYTES)
    handshake = ServerHandshake(tokens={"models": b"secret", "open": None}, nonce=bytes(32), welcome=_WELCOME)
    with contextlib.suppress(ProtocolError):
        for start in range(0, len(data), 64):
            reader.feed(data[start : start + 64])
            while (frame := reader.next_frame()) is not None:
                assert len(frame.body) <= _BODY_LIMIT_BYTES and frame.header.data_bytes == 0
                message = m.decode(frame.header.type, frame.body)
                if handshake.export is None:
                    answer = handshake.receive(message)
                    m.encode(answer, request_id=frame.header.request_id)
                    assert handshake.export != "models", "nobody who does not know the token gets in"
                    if isinstance(answer, m.Refused):
                        return


def client(data: bytes) -> None:
    """A stream from a hostile server: first the handshake, then replies to three open requests."""
    handshake = ClientHandshake(export="models", token=b"secret", nonce=bytes(32), software="tierfs")
    pending: PendingRequests[str] = PendingRequests(4)
    buffer = memoryview(bytearray(64))
    for request in ((m.Type.BLOCK_DATA, buffer), (m.Type.CHANGED, None), (m.Type.CATALOG_PART, None)):
        pending.add(request[0], "waiter", buffer=request[1], data_limit_bytes=128)
    with contextlib.suppress(ProtocolError):
        while len(data) >= HEADER_BYTES:
            header = parse_header(data[:HEADER_BYTES], body_limit_bytes=_BODY_LIMIT_BYTES, data_limit_bytes=4096)
            body = data[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
            rest = data[HEADER_BYTES + header.body_bytes :]
            message = m.decode(header.type, body)
            data = rest[header.data_bytes :]
            if isinstance(message, m.Challenge | m.Welcome | m.Refused | m.Proof):
                try:
                    answer = handshake.receive(message)
                    assert not isinstance(answer, m.Welcome), "a server that does not know the token is believed"
                except AuthenticationFailed:
                    return
                except ProtocolError:
                    raise
                except TierfsError:  # what a Refused stands for
                    return
                continue
            request = pending.match(header)
            assert request.buffer is None or header.type == m.Type.ERROR or header.data_bytes == len(request.buffer)
            pending.finish(request)


def catalog(data: bytes) -> None:
    """An encoded catalog from a hostile server, and everything that is asked of the tree built from it."""
    try:
        found = schema.decode(data)
    except ProtocolError:
        return
    assert schema.decode(schema.encode(found)) == found
    catalog_check.walk(found)


def config(data: bytes) -> None:
    """A configuration: that of a mount, and that of a server."""
    if any(place.encode() in data for place in _STRANGE_PATHS):
        return
    path = _config_path()
    path.write_bytes(data)
    for load in (load_mount_config, load_serve_config):
        try:
            load(path)
        except ConfigError as error:
            assert str(error).isprintable() or "\n" not in str(error), repr(error)


def control(data: bytes) -> None:
    """Messages of the channel to the daemon, its table of open files, its counters, and READ replies."""
    for decode in (
        channel.decode, channel.decode_read_reply, channel.decode_counters,
        lambda data: channel.decode_handles(data[1:], data[0] if data else 0),
    ):  # fmt: skip
        try:
            found = decode(data)
        except ProtocolError:
            continue
        if isinstance(found, tuple):
            serial, message = found
            if getattr(message, "text", getattr(message, "reason", "")).isascii():  # what is no UTF-8 is replaced
                assert channel.encode(serial, message) == data
        elif isinstance(found, channel.ReadReply):
            assert sum(part[3] for part in found.parts) == found.length_bytes


def _config_path() -> Path:
    """One file for this process, gone with its directory at the end."""
    if not _kept:
        _kept.append(tempfile.TemporaryDirectory(prefix="tierfs-fuzz-"))
    return Path(_kept[0].name) / f"{os.getpid()}.toml"


_kept: list["tempfile.TemporaryDirectory[str]"] = []

# The generators of the unit tests, which run them in every run by themselves.
OF_UNIT_TESTS: dict[str, Target] = {
    "catalog-entries": any_entries.hypothesis.fuzz_one_input,
    "catalog-damaged": damaged_catalog.hypothesis.fuzz_one_input,
    "frames": test_framing.test_frames_come_out_whole_however_the_stream_is_cut.hypothesis.fuzz_one_input,
}
TARGETS: dict[str, Target] = {
    "server": server, "client": client, "catalog": catalog, "config": config, "control": control, **OF_UNIT_TESTS,
}  # fmt: skip


def corpus(name: str) -> list[bytes]:
    """Sound inputs to start from, and some that were trouble elsewhere."""
    frames = [m.encode(example, request_id=number % 4, data_bytes=0)
              for number, example in enumerate(test_messages.EXAMPLES)]  # fmt: skip
    if name == "server":
        hello = m.encode(m.Hello("open", bytes(32), "tierfs", ()), request_id=0)
        return [*frames, hello + b"".join(frames[5:9]), b"GET / HTTP/1.1\r\n\r\n"]
    if name == "client":
        challenge = m.encode(m.Challenge(bytes(32)), request_id=0)
        block = m.encode(m.BlockData(bytes(16)), request_id=1, data_bytes=64) + bytes(64)
        return [*frames, challenge + m.encode(_WELCOME, request_id=0), block]
    if name == "catalog":
        return [catalog_check._GOOD, b"\x94\xa0\x01\xcd\x10\x00\xdd\xff\xff\xff\xff", b"\x91" * 5000]
    if name == "config":
        mount = b'[source]\nurl = "tierfs://h:1/e"\ntimeout = "30s"\n[warm]\npath = "w"\ncapacity = "1GiB"\n'
        serve = b'[server]\nlisten = ["tcp://127.0.0.1:7411"]\n[exports.e]\npath = "."\nsettle = "1h30m"\n'
        return [
            mount, mount + b'[hot]\npath = "h"\ncapacity = "50%"\n', serve,
            b'[source]\nurl = "dir:/srv"\n[mount]\nmode = "direct"\n[metrics]\nlisten = "unix:/m"\n',
            mount.replace(b"h:1/e", b"[::1"), mount.replace(b"1GiB", b"9" * 400 + b"TiB"),
            mount.replace(b'"w"', b'"' + b"w" * 5000 + b'"'), mount.replace(b'"w"', b"[" * 200 + b"]" * 200),
            b"x = " + b"[" * 5000, b"x = " + b"9" * 5000, b"a" + b".a" * 3000 + b" = 1", b"\xff[source]", b"\0",
        ]  # fmt: skip
    if name == "control":
        packets = [channel.encode(7, message) for message in test_channel_messages.MESSAGES]
        pieces = [test_channel_messages.Piece(test_channel_messages.At(1, 2), at * 8192, 4096) for at in range(3)]
        return [*packets, channel.encode_read_reply(6, pieces, file_bytes=99), b"\x01" + bytes(16), bytes(2048)]
    return [b"", bytes(64), bytes(range(256))]

"""The configuration: defaults, precedence, and that each mistake says file, key, what was found and expected."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierfs.blocks.errors import ConfigError
from tierfs.config.addresses import (
    Address,
    DirectorySource,
    RemoteSource,
    parse_address,
    parse_listen,
    parse_source_url,
)
from tierfs.config.load import load_mount_config, load_serve_config, serve_config_for_directory
from tierfs.config.memory import MemoryRoom, default_memory_limit, memory_room
from tierfs.config.relations import load_token, on_tmpfs

MIB = 1 << 20
SOURCE = '[source]\nurl = "tierfs://10.0.0.5:7411/models"\n'


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "tierfs.toml"
        path.write_text(text)
        return path

    return write


Write = Callable[[str], Path]


def test_the_source_is_all_that_is_needed(write: Write) -> None:
    config = load_mount_config(write(SOURCE))
    assert config.source.url == "tierfs://10.0.0.5:7411/models"
    assert config.hot is None and config.warm is None
    assert config.source.timeout == 30
    assert config.memory.limit == default_memory_limit(memory_room(), least_bytes=64 * MIB)
    assert config.mount.allow_other and config.mount.max_background == 64
    assert config.mount.request_timeout == 60, "source.timeout and 30 s"
    assert config.state_dir.is_absolute()


def test_values_carry_units_and_paths_start_at_the_file(write: Write, tmp_path: Path) -> None:
    text = (
        SOURCE
        + 'timeout = "500ms"\n[warm]\npath = "cache"\ncapacity = "1.5GiB"\nhigh_watermark = "90%"\n'
        + "low_watermark = 0.5\n[mount]\nuid = 1000\n"
    )
    config = load_mount_config(write(text))
    assert config.warm is not None
    assert config.source.timeout == 0.5
    assert config.warm.directories == (tmp_path / "cache",)
    assert config.warm.capacity == 1536 * MIB
    assert (config.mount.uid, config.mount.gid) == (1000, None)
    assert (config.warm.high_watermark, config.warm.low_watermark) == (0.9, 0.5)


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(SOURCE + 'connections = 8\n[warm]\npaths = ["/a", "/b"]\ncapacity = "2GiB"\n')
    config = load_mount_config(
        path, {"warm.capacity": "1GiB", "warm.path": "here", "mount.allow_other": False, "memory.limit": None}
    )
    assert config.warm is not None
    assert config.warm.capacity == 1024 * MIB
    assert config.warm.directories == (tmp_path / "here",), "the flag replaces the file's paths"
    assert config.source.connections == 8
    assert not config.mount.allow_other
    assert config.memory.limit == default_memory_limit(memory_room(), least_bytes=64 * MIB)


@pytest.mark.skipif(not on_tmpfs(Path("/dev/shm")), reason="/dev/shm is no tmpfs here")
def test_a_tier_on_a_tmpfs_gets_no_more_than_memory_has(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SOURCE + '[hot]\npath = "/dev/shm/tierfs-test-that-is-never-made"\n'
    room = MemoryRoom(total_bytes=64 << 30, limit_bytes=160 * MIB, available_bytes=160 * MIB, cgroup="/sys/fs/cgroup/a")
    monkeypatch.setattr("tierfs.config.load.memory_room", lambda pid: room)
    config = load_mount_config(write(text))
    assert config.memory.limit == 64 * MIB
    assert config.hot is not None and config.hot.capacity == int(96 * MIB * 0.9)
    with pytest.raises(ConfigError, match="hot.capacity is missing, and beside memory.limit .* the cgroup /sys/fs/cg"):
        load_mount_config(write(text), {"memory.limit": "160MiB"})


def test_a_tier_without_a_capacity_gets_one_from_its_disk(write: Write, tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    config = load_mount_config(write(SOURCE + '[warm]\npath = "warm"\n[hot]\npath = "not/yet/there"\n'))
    assert config.warm is not None and config.hot is not None
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert config.warm.capacity == pytest.approx(free * 0.9, rel=0.1)
    assert config.hot.capacity == pytest.approx(free * 0.9, rel=0.1)


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("", "source", "is missing; expected a table"),
        ("[source]\n", "source.url", "is missing; expected a text"),
        ('[source]\nurl = "http://x/"\n', "source.url", 'is "http://x/"; expected "tierfs://HOST:PORT/EXPORT"'),
        ('[source]\nurl = "dir:models"\n', "source.url", '"dir:/path"'),
        ('[source]\nurl = "dir:/m"\ntls = true\n', "source.tls", "a dir: source has no server"),
        ('[source]\nurl = "dir:/m"\ntransport = "tcp"\n', "source.transport", "a dir: source has no server"),
        (SOURCE + 'transport = "ib"\n', "source.transport", "ib"),
        (SOURCE + 'transport = "rdma"\ntls = true\n', "source.transport", "RDMA does not encrypt"),
        (SOURCE + "timeout = 30\n", "source.timeout", 'is 30; expected a duration such as "30s"'),
        (SOURCE + 'timeout = "0s"\n', "source.timeout", "expected more than 0"),
        (SOURCE + "connections = 0\n", "source.connections", "is 0; expected a whole number from 1 to 64"),
        (SOURCE + "connections = true\n", "source.connections", "is true; expected a whole number"),
        (SOURCE + 'token_file = "none"\n', "source.token_file", "expected a readable file with a token"),
        (SOURCE + 'tls_ca_file = "x"\n', "source.tls_ca_file", "expected source.tls = true"),
        (SOURCE + 'block_size = "5000B"\n', "source.block_size", "expected a multiple of 4KiB"),
        (SOURCE + '[warm]\npath = "w"\ncapcity = "1GiB"\n', "warm.capcity", "did you mean warm.capacity?"),
        (SOURCE + '[wram]\npath = "w"\n', "wram", "did you mean warm?"),
        ('capacity = "1GiB"\n' + SOURCE, "capacity", "did you mean hot.capacity?"),
        (SOURCE + "[memory]\nzzz = 1\n", "memory.zzz", "expected one of memory.limit"),
        (SOURCE + '[warm]\npath = "w"\ncapacity = "64"\n', "warm.capacity", 'is "64"; expected a size such as "64MiB"'),
        (SOURCE + "[warm]\n", "warm.path", "is missing; expected either warm.path or warm.paths"),
        (SOURCE + '[warm]\npath = "a"\npaths = ["b"]\n', "warm.path", "is given beside warm.paths"),
        (SOURCE + '[warm]\npaths = ["a", ""]\n', "warm.paths", "expected a list, each a path"),
        (SOURCE + '[warm]\npaths = ["a", "a/b"]\n', "warm.paths", "apart from"),
        (SOURCE + '[warm]\npath = "a"\n[hot]\npath = "a"\n', "warm.path", "of hot.path"),
        (SOURCE + '[warm]\npath = "a"\nlow_watermark = 0.99\n', "warm.low_watermark", "less than warm.high_watermark"),
        (SOURCE + '[warm]\npath = "a"\nhigh_watermark = 95\n', "warm.high_watermark", "is 95; expected a share"),
        (SOURCE + '[hot]\npath = "a"\nadmit = "all"\n', "hot.admit", 'expected one of "first", "second", "pinned"'),
        (SOURCE + "[hot]\n", "hot.path", "is missing; expected a path"),
        (
            '[source]\nurl = "dir:/srv/models"\n[memory]\nlimit = "32MiB"\n',
            "memory.limit",
            "at least 64MiB, which is 16 blocks of 4MiB",
        ),
        (SOURCE + '[readahead]\nwindow_max = "1MiB"\n', "readahead.window_min", "at most readahead.window_max"),
        (SOURCE + '[mount]\nrequest_timeout = "1s"\n', "mount.request_timeout", "at least source.timeout"),
        (SOURCE + "[mount]\nallow_other = 1\n", "mount.allow_other", "is 1; expected true or false"),
        (SOURCE + "[mount]\nuid = -1\n", "mount.uid", "is -1; expected a whole number from 0"),
        (SOURCE + '[log]\nlevel = "loud"\n', "log.level", 'is "loud"; expected one of "debug"'),
        ("log = 3\n" + SOURCE, "log", "is 3; expected a table"),
    ],
)
def test_a_mistake_names_file_key_found_and_expected(write: Write, text: str, key: str, says: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_mount_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {key} "), message
    assert says in message


def test_a_mistake_in_a_flag_is_laid_to_the_command_line(write: Write) -> None:
    with pytest.raises(ConfigError, match='^command line: warm.capacity is "much"; expected a size'):
        load_mount_config(write(SOURCE), {"warm.path": "/w", "warm.capacity": "much"})
    with pytest.raises(ConfigError, match="^command line: warm.capcity is not a known key; did you mean warm.capacity"):
        load_mount_config(write(SOURCE), {"warm.capcity": "1GiB"})


def test_a_file_that_is_no_toml_or_not_there_is_named(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tierfs.toml: not a TOML file: .*line 2"):
        load_mount_config(write("[source]\nurl =\n"))
    with pytest.raises(ConfigError, match="absent.toml: cannot be read: No such file"):
        load_mount_config(tmp_path / "absent.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_mount_config(tmp_path / "binary")


def test_tokens_lose_white_space_and_must_not_be_empty(write: Write, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("  secret\n")
    assert load_token(tmp_path / "token") == b"secret"
    assert load_mount_config(write(SOURCE + 'token_file = "token"\n')).source.token_file == tmp_path / "token"
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="source.token_file"):
        load_mount_config(write(SOURCE + 'token_file = "token"\n'))


def test_a_token_is_never_the_first_part_of_a_longer_one(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"t" * 4096 + b"\nmore")
    with pytest.raises(ConfigError, match="at most 4096 bytes"):
        load_token(tmp_path / "token")


def test_a_directory_is_served_under_the_empty_name(tmp_path: Path) -> None:
    config = serve_config_for_directory(tmp_path, {"server.listen": ["tcp://127.0.0.1:0"], "export.settle": "2s"})
    assert list(config.exports) == [""]
    assert config.exports[""].path == tmp_path
    assert config.exports[""].settle == 2
    assert config.server.listen == ("tcp://127.0.0.1:0",)
    with pytest.raises(ConfigError, match="^command line: export.path .*expected a directory that exists"):
        serve_config_for_directory(tmp_path / "absent")


def test_several_exports(write: Write, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    config = load_serve_config(write('[exports.one]\npath = "a"\n[exports.two]\npath = "b"\ndigest = false\n'))
    assert {name: export.path for name, export in config.exports.items()} == {
        "one": tmp_path / "a",
        "two": tmp_path / "b",
    }
    assert config.exports["one"].digest and not config.exports["two"].digest


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("", "exports", "is missing"),
        ("[exports]\n", "exports", "is empty"),
        ("[exports.m]\n", "exports.m.path", "is missing"),
        ('[exports.m]\npath = "absent"\n', "exports.m.path", "a directory that exists"),
        ('[exports.m]\npath = "m"\nsetle = "1s"\n', "exports.m.setle", "did you mean exports.m.settle?"),
        ('[exports."a/b"]\npath = "m"\n', "exports.a/b", "is no name"),
        ('[exports.m]\npath = "m"\ndigest_workers = 0\n', "exports.m.digest_workers", "from 1 to 256"),
        ('[exports.m]\npath = "m"\n[server]\nlisten = []\n', "server.listen", "a list"),
        ('[exports.m]\npath = "m"\n[server]\nlisten = ["7411"]\n', "server.listen", 'expected "tcp://HOST:PORT"'),
        ('[exports.m]\npath = "m"\n[server]\nlisten = ["tcp://0.0.0.0:1"]\n', "server.listen", "exports.m.token_file"),
        ('[exports.m]\npath = "m"\n[server]\ntls_cert_file = "m"\n', "server.tls_key_file", "is missing"),
        ('[exports.m]\npath = "m"\n[server]\nstate_dir = "m/s"\n', "server.state_dir", "outside of exports.m.path"),
        ('[exports.m]\npath = "m"\n[server]\nmemory_limit = "1MiB"\n', "server.memory_limit", "at least 64MiB"),
    ],
)
def test_a_mistake_in_a_server_file(write: Write, tmp_path: Path, text: str, key: str, says: str) -> None:
    (tmp_path / "m").mkdir()
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_serve_config(path)
    assert str(caught.value).startswith(f"{path}: {key} "), caught.value
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("tierfs://127.0.0.1:7411/", RemoteSource(Address("127.0.0.1", 7411), "")),
        ("tierfs://node", RemoteSource(Address("node", 7411), "")),
        ("tierfs://node/", RemoteSource(Address("node", 7411), "")),
        ("tierfs://10.0.0.5:7411/models", RemoteSource(Address("10.0.0.5", 7411), "models")),
        ("tierfs://10.0.0.5/models/", RemoteSource(Address("10.0.0.5", 7411), "models")),
        ("tierfs://[::1]:80/a%20b", RemoteSource(Address("::1", 80), "a b")),
        ("tierfs://[::1]:99/m-1", RemoteSource(Address("::1", 99), "m-1")),
        ("dir:/srv/models", DirectorySource("/srv/models")),
    ],
)
def test_source_urls(text: str, source: Any) -> None:
    assert parse_source_url(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dir:",
        "dir:x",
        "tierfs://",
        "tierfs://h:0/",
        "tierfs://h:70000/",
        "tierfs://h/a/b",
        "tierfs://u@h/a",
        "tierfs://[x]/",
        "http://h/",
        "tierfs:/h",
        "tierfs://h:99999/",
        "tierfs://::1:80/",
        "tierfs://u@h/",
        "tierfs://h/%ff",
        "tierfs://h/x?y",
        "tierfs://h/" + "x" * 256,
    ],
)
def test_bad_source_urls(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_source_url(text)


def test_which_addresses_stay_on_this_machine() -> None:
    local = [parse_listen(f"tcp://{host}:1").loopback for host in ("127.0.0.1", "127.9.9.9", "[::1]", "localhost")]
    others = [parse_listen(f"tcp://{host}:1").loopback for host in ("0.0.0.0", "[::]", "10.0.0.1", "node")]
    assert all(local) and not any(others)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://127.0.0.1:80", Address("127.0.0.1", 80)),
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("tcp://storage-1.local", Address("storage-1.local", 7411)),
        ("tcp://[::1]:80/", Address("::1", 80)),
        ("[fe80::1%eth0]", Address("fe80::1%eth0", 7411)),
    ],
)
def test_an_address_is_parsed_and_printed(text: str, expected: Address) -> None:
    assert parse_address(text) == expected
    assert parse_address(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "tcp://", "udp://h:1", "h:p", "h:65536", "::1:80", "[h]:1", "[]:1", "a b:1", "u@h:1", "h:1/x", "h:-1"]
)
def test_what_is_no_address_is_a_mistake_in_the_configuration(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1%lo", False)],
)  # fmt: skip
def test_loopback_is_told_from_the_rest(host: str, expected: bool) -> None:
    assert Address(host, 0).loopback is expected

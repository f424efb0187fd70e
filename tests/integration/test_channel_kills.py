"""Daemons killed over and over under every kind of reader: nothing is lost, nothing is wrong, nothing grows.

TIERFS_KILLS sets how many (12 by default, 5 for the sanitized programs), TIERFS_KILL_SEED the seed that is printed
otherwise. The readers are kill_load.py, one process each.
"""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.channel_load import counters, make_truth, readers
from tests.integration.processes import Mount, Serve, descriptors, eventually, process_status, runs, tierfs
from tests.integration.test_channel import channel_status, use
from tierfs.blocks.errors import ControlError
from tierfs.control import registry
from tierfs.control.socket import ask

KILLS = int(os.environ.get("TIERFS_KILLS", "0"))
EVERY_S = 2.0
START_KILLS = 4  # daemons in a row that do not get through their start
READY_S = 120.0
GRACE_S = 300  # on a slow machine several daemons in a row take a while to not get through their start
FDS_LENT = 64  # objects of the warm tier there may be at once, and then some
SHOWN = ("passthrough_opens", "cached_opens", "held_back_opens", "replays", "grace_waits", "pending_max")

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.timeout(300 + 15 * KILLS),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]
MakeMount = Callable[..., Mount]


@pytest.fixture(scope="module")
def kill_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(params=["plain", "address", "thread"])
def build_kind(request: pytest.FixtureRequest, kill_programs: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    kind: str = request.param
    use(kill_programs, monkeypatch, kind)
    return kind


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_truth(tmp_path_factory.mktemp("truth"))


@dataclass
class Sample:
    """What must not grow, of the channel and of the daemon that is just ready."""

    kills: int
    channel_rss_kib: int
    channel_anonymous_kib: int
    channel_fds: int
    channel_threads: int
    channel_memory_files: int  # maps and descriptors of them: pools and leases of daemons, counters
    daemon_rss_kib: int
    daemon_fds: int
    daemon_other_fds: int  # no objects of tiers
    passthrough_inodes: int
    pending: int


class Victims:
    """The daemons of one channel, one after the other."""

    def __init__(self, mounted: Mount) -> None:
        self.mounted = mounted
        self.channel = mounted.channel_pid
        self.last = mounted.pid
        self.start_s = 1.0  # how long a start takes

    def _child(self) -> int:
        children = Path(f"/proc/{self.channel}/task/{self.channel}/children").read_text().split()
        return next((int(pid) for pid in children if int(pid) != self.last and runs(int(pid))), 0)

    def next(self) -> int:
        """The pid of the daemon that follows the killed one, as soon as it is there."""
        deadline = time.monotonic() + READY_S
        while not (pid := self._child()):
            assert runs(self.channel), "the channel has died"
            assert time.monotonic() < deadline, "no other daemon is started"
            time.sleep(0.002)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.last = pid

    def ready(self, pid: int) -> None:
        """Wait until this daemon answers."""
        start = time.monotonic()
        while True:
            assert runs(self.channel), "the channel has died"
            assert runs(pid), f"a daemon ended by itself: {self.mounted.log()[-3000:]}"
            assert time.monotonic() < start + READY_S, f"the daemon is not ready: {self.mounted.log()[-3000:]}"
            try:
                record = registry.find(str(self.mounted.path))
                if record.daemon_pid == pid and next(ask(record, "status", timeout_s=10))["daemon"]["pid"] == pid:
                    break
            except (ControlError, StopIteration):
                pass
            time.sleep(0.02)
        self.mounted.pid = pid
        self.start_s = time.monotonic() - start

    def sample(self, kills: int, pid: int) -> Sample:
        channel, daemon = process_status(self.channel), process_status(pid)
        maps = Path(f"/proc/{self.channel}/maps").read_text().splitlines()
        links, daemon_links, named = descriptors(self.channel), descriptors(pid), counters(self.channel)
        return Sample(
            kills=kills,
            channel_rss_kib=channel["VmRSS"],
            channel_anonymous_kib=channel["RssAnon"],
            channel_fds=len(links),
            channel_threads=channel["Threads"],
            channel_memory_files=sum("memfd" in line for line in [*links, *maps]),
            daemon_rss_kib=daemon["VmRSS"],
            daemon_fds=len(daemon_links),
            daemon_other_fds=sum("/objects/" not in link for link in daemon_links),
            passthrough_inodes=named["passthrough_inodes"],
            pending=named["pending"],
        )

    def end(self, pid: int, how: str) -> None:
        """See that this daemon ends, in one way or another."""
        self.last = pid
        if how == "replaced":
            os.kill(self.channel, signal.SIGHUP)
        elif how == "stopped, then replaced":  # the channel waits for it for a while
            os.kill(pid, signal.SIGSTOP)
            os.kill(self.channel, signal.SIGHUP)
        elif how == "told":
            os.kill(pid, signal.SIGTERM)
        elif how == "stopped, then killed":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
        else:
            self.kill(pid)

    def pauses(self) -> list[str]:
        """How long the channel waited before each of the daemons."""
        return re.findall(r"starting another in ([0-9.]+) s", self.mounted.log())

    def replace_idle(self, kills: int) -> Sample:
        """Another daemon while there is no reader."""
        self.kill(self.mounted.pid)
        pid = self.next()
        self.ready(pid)
        return self.sample(kills, pid)


def kills_of(kind: str) -> int:
    return KILLS or (12 if kind == "plain" else 5)


def seed_of_this_run() -> int:
    seed = int(os.environ.get("TIERFS_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print(f"TIERFS_KILL_SEED={seed}")
    return seed


def small_warm_mount(mount: MakeMount, serve: Callable[..., Serve], truth: Path, tmp_path: Path) -> Mount:
    """With room for some of the models only."""
    server = serve(truth)
    return mount(
        server.url,
        warm=f'path = "{tmp_path}/warm"\ncapacity = "96MiB"',
        mode="channel",
        timeout="60s",
        options=f'restart_grace = "{GRACE_S}s"',
        extra='[memory]\nlimit = "96MiB"\n',
    )


def assert_flat(idle: list[Sample], loaded: list[Sample], kind: str, *, passthrough: bool) -> None:
    """Of a fresh daemon without readers, before all and after all: the same. Under load: about the same, from a tenth
    of the kills on.
    """
    few = max(1, min(10, len(loaded) // 4))
    begin, end = loaded[len(loaded) // 10 :][:few], loaded[-few:]
    print(f"idle before {idle[0]}\nbegin {begin[0]}\nend   {end[-1]}\nidle after {idle[-1]}")

    print("anonymous KiB", [one.channel_anonymous_kib for one in loaded[:: max(1, len(loaded) // 20)]])

    def least(some: list[Sample], name: str) -> float:
        return float(min(getattr(one, name) for one in some))

    for name in ("channel_fds", "channel_threads", "channel_memory_files"):
        assert getattr(idle[-1], name) == getattr(idle[0], name), name
    assert idle[-1].daemon_other_fds <= idle[0].daemon_other_fds + 6  # its connections to the source come and go
    for name in ("channel_threads", "channel_memory_files"):
        assert least(end, name) <= least(begin, name), name
    assert least(end, "passthrough_inodes") <= 8
    if passthrough:
        assert min(one.passthrough_inodes for one in loaded) >= 1, "the map that was in passthrough is not any more"
    assert least(end, "channel_fds") <= least(begin, "channel_fds") + FDS_LENT
    assert least(end, "daemon_rss_kib") <= least(begin, "daemon_rss_kib") + (40 << 10)
    if kind == "plain":  # the sanitizers keep freed memory, and shadows of it
        assert least(end, "channel_anonymous_kib") <= least(begin, "channel_anonymous_kib") + (20 << 10)
        assert idle[-1].channel_anonymous_kib <= idle[0].channel_anonymous_kib + (40 << 10)  # buffers of eight copiers


def assert_quiet(mounted: Mount, kills: int) -> None:
    """Readers gone: nothing is owed, nothing is held."""
    named: dict[str, Any] = {}

    def nothing_is_held() -> bool:
        named.update(counters(mounted.channel_pid))
        return bool(named["pending"] == 0 and named["passthrough_inodes"] == 0)

    eventually(nothing_is_held, "no request is pending, and no inode in passthrough")
    eventually(lambda: mounted.status()["open_files"] == 0, "the daemon knows of no open file")
    eventually(lambda: channel_status(mounted)["outstanding_leases"] == 0, "no lease is out")
    assert named["bad_messages"] == 0
    assert named["refused_requests"] == 0
    assert named["failed_copies"] == 0
    assert named["daemon_starts"] == kills + 1
    print({name: named[name] for name in SHOWN})
    assert "_by_bug" not in mounted.log(), mounted.log()[-5000:]


def assert_clean_end(mounted: Mount) -> None:
    """The channel has ended, and no sanitizer had anything to say: at the end it looks for what was never freed."""
    mounted.unmount()
    eventually(lambda: not runs(mounted.channel_pid), "the channel has ended")
    assert "Sanitizer" not in mounted.log(), mounted.log()[-5000:]


def test_readers_of_every_kind_outlive_their_daemons(
    build_kind: str, truth: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    seed = seed_of_this_run()
    rng = random.Random(seed)
    mounted = small_warm_mount(mount, serve, truth, tmp_path)
    victims = Victims(mounted)
    idle = [victims.replace_idle(1)]
    for model in ("m0", "m1"):
        tierfs("warm", mounted.path / model, timeout_s=60)
    samples: list[Sample] = []
    kills = kills_of(build_kind)
    with readers(mounted, truth, tmp_path, seed, passthrough=True) as all_well:
        pid = mounted.pid
        for number in range(kills):
            time.sleep(rng.uniform(0.1, 1.9) * EVERY_S / 2)
            victims.kill(pid)
            pid = victims.next()
            time.sleep(rng.uniform(0.1, 1.9) * EVERY_S / 2 * (number % 2))
            all_well()
            victims.ready(pid)
            samples.append(victims.sample(number + 1, pid))
    assert_quiet(mounted, kills + 1)
    idle.append(victims.replace_idle(kills + 2))
    assert_flat(idle, samples, build_kind, passthrough=mounted.status()["kernel"]["passthrough"])
    assert_clean_end(mounted)


def test_daemons_killed_while_they_start_lose_nothing(
    build_kind: str, truth: Path, tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    seed = seed_of_this_run()
    rng = random.Random(seed)
    mounted = small_warm_mount(mount, serve, truth, tmp_path)
    victims = Victims(mounted)
    idle = [victims.replace_idle(1)]
    for model in ("m0", "m1"):
        tierfs("warm", mounted.path / model, timeout_s=60)
    samples: list[Sample] = []
    kills = 1
    with readers(mounted, truth, tmp_path, seed, passthrough=True) as all_well:
        pid = mounted.pid
        while kills < kills_of(build_kind):
            for number in range(START_KILLS):
                victims.kill(pid)
                kills += 1
                pid = victims.next()
                if number < START_KILLS - 1:
                    # Early in its start, or about when it takes over.
                    time.sleep(rng.choice((rng.uniform(0, 0.3), rng.uniform(0.5, 1.1) * victims.start_s)))
            victims.ready(pid)
            samples.append(victims.sample(kills, pid))
            time.sleep(rng.uniform(0, 0.5))
            all_well()
    assert_quiet(mounted, kills)
    idle.append(victims.replace_idle(kills + 1))
    assert_flat(idle, samples, build_kind, passthrough=mounted.status()["kernel"]["passthrough"])
    assert_clean_end(mounted)


def test_a_daemon_that_lived_without_work_is_followed_at_once(
    kill_programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    truth: Path,
    tmp_path: Path,
    mount: MakeMount,
    serve: Callable[..., Serve],
) -> None:
    use(kill_programs, monkeypatch, "plain")
    victims = Victims(small_warm_mount(mount, serve, truth, tmp_path))
    for kills in (1, 2, 3):  # dead before they have done anything
        victims.replace_idle(kills)
    assert set(victims.pauses()[1:]) != {"0.0"}, "the pause does not grow"
    time.sleep(6.0)  # longer than the longest pause
    victims.replace_idle(4)
    assert victims.pauses()[-1] == "0.0"


def test_a_listing_that_pauses_over_new_versions_and_new_daemons_goes_on(
    tmp_path: Path, mount: MakeMount, serve: Callable[..., Serve]
) -> None:
    root = tmp_path / "models"
    (root / "many").mkdir(parents=True)
    expected = [f"a-rather-long-name-of-a-small-file-{number:05d}" for number in range(2500)]
    for name in expected:
        (root / "many" / name).touch()
    mounted = mount(serve(root, "--set", "exports..rescan=100ms").url, mode="channel")
    victims = Victims(mounted)
    with os.scandir(mounted.path / "many") as entries:
        names = [next(entries).name]
        for number in range(4):
            generation = mounted.status()["catalog"]["generation"]
            (root / f"new{number}").touch()
            if number % 2:  # else it is new to the next daemon only
                eventually(lambda seen=generation: mounted.status()["catalog"]["generation"] > seen, "a new generation")
            victims.kill(mounted.pid)
            time.sleep(0.3)
            victims.ready(victims.next())
            names += [next(entries).name for _ in range(400)]
        names += [entry.name for entry in entries]
    assert sorted(names) == expected
    assert (mounted.path / "new3").exists()


WAYS = ["replaced", "told", "stopped, then killed", "killed", "stopped, then replaced"]


def test_daemons_that_end_in_other_ways_cost_readers_as_little(
    kill_programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    truth: Path,
    tmp_path: Path,
    mount: MakeMount,
    serve: Callable[..., Serve],
) -> None:
    use(kill_programs, monkeypatch, "plain")
    seed = seed_of_this_run()
    rng = random.Random(seed)
    mounted = small_warm_mount(mount, serve, truth, tmp_path)
    tierfs("warm", mounted.path / "m1", timeout_s=60)
    victims = Victims(mounted)
    ways = rng.sample(WAYS, len(WAYS))
    with readers(mounted, truth, tmp_path, seed, passthrough=True) as all_well:
        pid = mounted.pid
        for how in ways:
            time.sleep(rng.uniform(0.1, 1.0))
            victims.end(pid, how)
            pid = victims.next()
            all_well()
            victims.ready(pid)
    assert_quiet(mounted, len(ways))
    assert_clean_end(mounted)

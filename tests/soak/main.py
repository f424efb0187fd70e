"""The soak: every kind of load with faults, kills and new versions at random, and nothing left at the end.

``python -m tests.soak.main --minutes N --seed S DIRECTORY``, by tests/soak.sh. One server, behind a relay that can be
hurt, and two mounts of it, one in channel mode and one in direct mode, each with a warm tier that holds a part of the
models. Readers compare every byte with what is exported. First a tenth of the time goes without faults; then all is
quiet and what must not grow is written down; then the faults come; at the end all is quiet again, and compared.

What may happen to a reader: time, and ESTALE where its version was replaced. All else ends the soak with its seed.
"""

import argparse
import functools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from tests.faults import fault_proxy
from tests.faults.fault_proxy import Answer, FaultProxy
from tests.integration.channel_load import make_truth, running
from tests.integration.processes import (
    ROOT,
    Mount,
    Serve,
    descriptors,
    drop_caches,
    eventually,
    process_status,
    runs,
    tierfs,
)
from tests.integration.version_reader import publish

WARM_BYTES = 96 << 20
MEMORY_KIB = 96 << 10
VERSION_PAGES = 2048
SEEN_WITHIN_S = 30.0  # with kills and outages in between
HANG_S = 120.0
SHOW_S = 300.0
PUBLISHED = "published/model.bin"
LOAD = ROOT / "tests" / "integration" / "kill_load.py"
VERSIONS = ROOT / "tests" / "integration" / "version_reader.py"


@dataclass
class Sample:
    """What must be back where it was once all is quiet."""

    daemon_rss_kib: int
    daemon_descriptors: int  # without those of objects, whose number has its own bound
    daemon_threads: int
    channel_rss_kib: int
    channel_descriptors: int
    channel_threads: int
    warm_bytes: int
    state_bytes: int
    kernel_waiting: int


# What each may have grown by.
SLACK = Sample(
    daemon_rss_kib=MEMORY_KIB + (32 << 10),  # its buffers may not all have been used before
    daemon_descriptors=16,  # connections come and go
    daemon_threads=8,
    channel_rss_kib=32 << 10,
    channel_descriptors=40,
    channel_threads=0,
    warm_bytes=0,  # compared with the capacity
    state_bytes=8 << 20,
    kernel_waiting=0,
)


class World:
    """The server, the relay, the two mounts, and all that can be done to them."""

    def __init__(self, work: Path, rng: random.Random, stack: ExitStack) -> None:
        self.work = work
        self.random = rng
        self.truth = work / "truth"
        self.truth.mkdir()
        make_truth(self.truth)
        (self.truth / "published").mkdir()
        self.news = work / "news"
        self.version = 1
        publish(self.truth / PUBLISHED, 1, VERSION_PAGES, self.news)
        (work / "serve").mkdir()
        self.server = Serve(self.truth, work / "serve", "--set", "exports..rescan=300ms")
        stack.callback(self.server.stop)
        self.proxy = FaultProxy(self.server.url)
        stack.callback(self.proxy.close)
        self.channel = self._mount("channel", stack)
        self.direct = self._mount("direct", stack)
        self.done: Counter[str] = Counter()

    def _mount(self, mode: str, stack: ExitStack) -> Mount:
        work = self.work / mode
        work.mkdir()
        mounted = Mount(
            self.proxy.url,
            work,
            warm=f'path = "{work}/warm"\ncapacity = "{WARM_BYTES >> 20}MiB"',
            mode=mode,
            timeout="60s",
            options='metadata_ttl = "500ms"\nrestart_grace = "120s"',
            extra=f'[memory]\nlimit = "{MEMORY_KIB}KiB"\n',
        )
        stack.callback(mounted.cleanup)
        mounted.mount()
        return mounted

    @property
    def mounts(self) -> list[Mount]:
        """Both."""
        return [self.channel, self.direct]

    def find_daemon(self) -> int:
        """The pid of the daemon that serves the channel now."""

        def found() -> bool:
            children = Path(f"/proc/{self.channel.channel_pid}/task/{self.channel.channel_pid}/children").read_text()
            pids = [int(pid) for pid in children.split() if runs(int(pid))]
            if len(pids) == 1:
                self.channel.pid = pids[0]
            return len(pids) == 1

        eventually(found, "there is one daemon", HANG_S)
        return self.channel.pid

    # what can happen

    def kill_daemon(self) -> None:
        """As the OOM killer does."""
        os.kill(self.find_daemon(), signal.SIGKILL)

    def stop_daemon(self) -> None:
        """It does nothing for a while."""
        pid = self.random.choice([self.find_daemon(), self.direct.pid])
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(self.random.uniform(0.5, 5))
        finally:
            os.kill(pid, signal.SIGCONT)

    def restart_daemon(self) -> None:
        """On purpose."""
        tierfs("restart", self.channel.path, timeout_s=HANG_S)

    def kill_server(self) -> None:
        """It is back after a while."""
        self.server.kill()
        time.sleep(self.random.uniform(0, 4))
        self.server.start()

    def source_down(self) -> None:
        """For a while."""
        self.proxy.down()
        time.sleep(self.random.uniform(0.2, 5))
        self.proxy.up()

    def source_silent(self) -> None:
        """For a while."""
        self.proxy.silence(True)
        time.sleep(self.random.uniform(0.2, 5))
        self.proxy.silence(False)

    def source_half_open(self) -> None:
        """The connections there are go nowhere any more."""
        self.proxy.half_open()

    def source_faulty(self) -> None:
        """One block of four comes wrong, short, or with a reset."""
        fault = self.random.choice([fault_proxy.wrong_bytes, fault_proxy.short, fault_proxy.reset])
        blocks = 0

        def sometimes(client: "fault_proxy.socket.socket", answer: Answer) -> None:
            nonlocal blocks
            blocks += answer.is_block
            (fault if answer.is_block and blocks % 4 == 0 else fault_proxy.none)(client, answer)

        self.proxy.suffer(sometimes)
        time.sleep(self.random.uniform(0.5, 3))
        self.proxy.suffer(fault_proxy.none)

    def publish(self) -> None:
        """A new version over the one that is read."""
        self.version += 1
        publish(self.truth / PUBLISHED, self.version, VERSION_PAGES, self.news)

    def drop_caches(self) -> None:
        """The kernel's."""
        drop_caches()

    def evict(self) -> None:
        """A model, out of a tier."""
        tierfs("evict", self.random.choice(self.mounts).path / f"m{self.random.randrange(8)}", check=False)

    def warm(self) -> None:
        """A model, into a tier."""
        tierfs(
            "warm", self.random.choice(self.mounts).path / f"m{self.random.randrange(8)}", timeout_s=HANG_S, check=False
        )

    def reload(self) -> None:
        """The configuration."""
        os.kill(self.direct.pid, signal.SIGHUP)
        tierfs("reload", self.channel.path, timeout_s=HANG_S, check=False)

    def flip(self) -> None:
        """A byte of the direct mount's warm tier rots. (Under passthrough nobody but the disk could tell.)"""
        objects = [path for path in (self.direct.work / "warm").rglob("objects/*/*") if path.is_file()]
        if not objects:
            return
        try:
            with self.random.choice(objects).open("r+b") as file:
                at = self.random.randrange(max(1, os.fstat(file.fileno()).st_size))
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([(byte[0] if byte else 0) ^ 1]))
        except FileNotFoundError:
            pass  # evicted meanwhile

    def kill_reader(self) -> None:
        """In the middle of a cold read."""
        path = self.random.choice(self.mounts).path / "m7" / "weights.bin"
        reader = subprocess.Popen(["cat", str(path)], stdout=subprocess.DEVNULL)
        time.sleep(self.random.uniform(0, 0.3))
        reader.kill()
        reader.wait(HANG_S)

    def one_event(self) -> None:
        """Something of all that."""
        events: list[Callable[[], None]] = [
            self.kill_daemon, self.kill_daemon, self.stop_daemon, self.restart_daemon, self.kill_server,
            self.source_down, self.source_silent, self.source_half_open, self.source_faulty, self.publish, self.publish,
            self.drop_caches, self.evict, self.warm, self.reload, self.flip, self.kill_reader,
        ]  # fmt: skip
        event = self.random.choice(events)
        self.done[event.__name__] += 1
        print(f"{time.strftime('%H:%M:%S')} {event.__name__}", flush=True)
        event()

    # what must hold at the end

    def sample(self, mounted: Mount) -> Sample:
        """Of one mount at rest."""
        pid = self.find_daemon() if mounted is self.channel else mounted.pid
        daemon = process_status(pid)
        channel = process_status(mounted.channel_pid) if mounted.channel_pid else {"VmRSS": 0, "Threads": 0}
        device = os.minor(os.stat(mounted.path).st_dev)
        return Sample(
            daemon_rss_kib=daemon["VmRSS"],
            daemon_descriptors=sum("/objects/" not in link for link in descriptors(pid)),
            daemon_threads=daemon["Threads"],
            channel_rss_kib=channel["VmRSS"],
            channel_descriptors=len(descriptors(mounted.channel_pid)) if mounted.channel_pid else 0,
            channel_threads=channel["Threads"],
            warm_bytes=disk_bytes(mounted.work / "warm"),
            state_bytes=disk_bytes(mounted.work / "state"),
            kernel_waiting=int(Path(f"/sys/fs/fuse/connections/{device}/waiting").read_text()),
        )

    def rest(self) -> None:
        """No reader is there: wait until nothing is under way."""
        self.find_daemon()
        for mounted in self.mounts:
            eventually(functools.partial(at_rest, mounted), "connected, and no file is open", HANG_S)
        time.sleep(3)


def at_rest(mounted: Mount) -> bool:
    """Whether its daemon answers, has its source, and holds no file for anybody."""
    done = tierfs("status", mounted.path, "--json", check=False)
    if done.returncode != 0:
        return False
    status = json.loads(done.stdout)
    return bool(status["source"]["state"] == "connected" and status["open_files"] == 0)


def disk_bytes(directory: Path) -> int:
    """What files there take."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def commands_of(world: World, seed: int, stop: Path) -> list[tuple[str, list[str]]]:
    """Readers of every kind on both mounts."""
    commands: list[tuple[str, list[str]]] = []
    for mounted in world.mounts:
        kind = mounted.work.name
        roles = {"read": range(8), "maps": range(1, 4), "find": (), "churn": range(8)}
        if kind == "channel":
            roles["list"] = ()
        for role, models in roles.items():
            command = [str(LOAD), role, str(mounted.path), str(world.truth), str(stop), str(seed + len(commands))]
            commands.append((f"{kind} {role}", [*command, *(f"m{model}/weights.bin" for model in models)]))
        for how in ("read", "map"):
            command = [str(VERSIONS), how, str(mounted.path / PUBLISHED), str(stop), str(world.news)]
            commands.append((f"{kind} versions {how}", [*command, str(SEEN_WITHIN_S)]))
    return commands


def loads(world: World, seed: int, number: int) -> AbstractContextManager[Callable[[], None]]:
    """Those readers, running; see channel_load.running."""
    stop = world.work / f"stop{number}"
    return running(commands_of(world, seed, stop), world.work, stop, HANG_S)


def compare(before: Sample, after: Sample, name: str) -> list[str]:
    """What is not back where it was; prints both."""
    wrong = []
    for field in fields(Sample):
        was, is_, slack = (getattr(one, field.name) for one in (before, after, SLACK))
        print(f"  {name:8} {field.name:20} {was:>12} {is_:>12}")
        limit = WARM_BYTES * 1.02 if field.name == "warm_bytes" else was + slack
        if is_ > limit:
            wrong.append(f"{name}: {field.name} was {was} and is {is_}")
    return wrong


def soak(work: Path, minutes: float, seed: int) -> None:
    """Raises AssertionError with what is wrong."""
    end_s = time.monotonic() + minutes * 60
    quiet_s = max(6.0, minutes * 6)
    rng = random.Random(seed)
    with ExitStack() as stack:
        world = World(work, rng, stack)
        for mounted in world.mounts:
            tierfs("warm", mounted.path / "m1", timeout_s=HANG_S)
        with loads(world, seed, 0) as all_well:
            time.sleep(quiet_s)
            all_well()
        world.kill_daemon()  # as the daemon at the end will, this one has a start behind it, and not much more
        world.rest()
        before = [world.sample(mounted) for mounted in world.mounts]
        shown_s = time.monotonic()
        with loads(world, seed, 1) as all_well:
            while time.monotonic() < end_s:
                if time.monotonic() - shown_s > SHOW_S:
                    shown_s = time.monotonic()
                    for mounted in world.mounts:
                        print(f"  {mounted.work.name}: {world.sample(mounted)}", flush=True)
                world.one_event()
                time.sleep(rng.uniform(0.2, 3))
                all_well()
        world.kill_daemon()
        world.rest()
        print(f"events: {dict(sorted(world.done.items()))}; versions published: {world.version}")
        wrong = []
        for mounted, sample in zip(world.mounts, before, strict=True):
            wrong += compare(sample, world.sample(mounted), mounted.work.name)
            if "_by_bug" in mounted.log():
                wrong.append(f"{mounted.work.name}: a mistake in tierfs is in the log")
        assert not wrong, "\n".join(wrong)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"soak: {options.minutes:g} minutes, --seed {seed}", flush=True)
    try:
        soak(options.directory, options.minutes, seed)
    except BaseException:
        print(f"soak: FAILED, --seed {seed}", flush=True)
        raise
    print("soak: nothing was wrong, and nothing is left")


if __name__ == "__main__":
    main()

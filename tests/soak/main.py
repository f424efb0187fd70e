"""The soak: every kind of load with faults, kills and new versions at random, and nothing left at the end.

``python -m tests.soak.main --minutes N --seed S DIRECTORY``, by tests/soak.sh. Each mount has a warm tier that holds a
part of the models, and its server behind a relay that can be hurt:

    channel, direct    of one server, which is killed now and then
    mortal             in direct mode, its daemon is killed; of a server that lives as long as the soak

Readers compare every byte with what is exported. First a tenth of the time goes without faults; then all is quiet and
what must not grow is written down; then the faults come; at the end all is quiet again, and compared.

What may happen to a reader: time, ESTALE where its version was replaced, errors where its direct mount died. All else
ends the soak with its seed, also a reader that hangs: it is seen within a minute or two, with what it waits for.
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
from pathlib import Path

import numpy
from safetensors.numpy import save_file

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
    family,
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
WEIGHTS = [f"m{model}/weights.bin" for model in range(8)]
SHARDS = [f"sharded/model-{shard:05d}-of-00003.safetensors" for shard in (1, 2, 3)]
SERVER_IDLE_S = 60.0  # 30 s that a server keeps an exported file open, and two busy cores
LOAD = ROOT / "tests" / "integration" / "kill_load.py"
VERSIONS = ROOT / "tests" / "integration" / "version_reader.py"


Figures = dict[str, int]

# What each may have grown by, once all is quiet. Descriptors are counted without those of objects and of exported
# files, whose numbers have bounds of their own.
SLACK: Figures = {
    "daemon rss KiB": MEMORY_KIB + (32 << 10),  # its buffers may not all have been used before
    "daemon descriptors": 16,  # connections come and go
    "daemon threads": 8,
    "channel rss KiB": 32 << 10,
    "channel descriptors": 40,
    "channel threads": 0,
    "server rss KiB": 96 << 10,  # as of the daemons: its buffers, and 32 MiB
    "server descriptors": 16,
    "server threads": 8,
    "state KiB": 8 << 10,
    "requests waiting": 0,
    "mounts": 0,
    "processes": 0,
}


class World:
    """The server, the relay, the two mounts, and all that can be done to them."""

    def __init__(self, work: Path, rng: random.Random, stack: ExitStack) -> None:
        self.work = work
        self.random = rng
        self.truth = work / "truth"
        self.truth.mkdir()
        make_truth(self.truth)
        make_shards(self.truth)
        (self.truth / "published").mkdir()
        self.news = work / "news"
        self.version = 1
        publish(self.truth / PUBLISHED, 1, VERSION_PAGES, self.news)
        self.server, relay = self._serve("serve", "300ms", stack)
        self.steady, steady_relay = self._serve("steady", "2s", stack)
        self.relays = [relay, steady_relay]
        self.deaths = 0
        self.channel = self._mount("channel", "channel", relay, stack)
        self.direct = self._mount("direct", "direct", relay, stack)
        self.mortal = self._mount("mortal", "direct", steady_relay, stack)
        self._tell_deaths(0)
        self.done: Counter[str] = Counter()

    def _serve(self, name: str, rescan: str, stack: ExitStack) -> tuple[Serve, FaultProxy]:
        (self.work / name).mkdir()
        server = Serve(self.truth, self.work / name, "--set", f"exports..rescan={rescan}")
        stack.callback(server.stop)
        relay = FaultProxy(server.url)
        stack.callback(relay.close)
        return server, relay

    def _mount(self, name: str, mode: str, relay: FaultProxy, stack: ExitStack) -> Mount:
        work = self.work / name
        work.mkdir()
        mounted = Mount(
            relay.url,
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
        """All."""
        return [self.channel, self.direct, self.mortal]

    def pids(self) -> list[int]:
        """What serves the mounts; the servers are children of this process."""
        daemons = [pid for mounted in self.mounts for pid in (mounted.pid, mounted.channel_pid) if pid]
        return sorted({pid for daemon in daemons if runs(daemon) for pid in family(daemon)})

    def _tell_deaths(self, deaths: int) -> None:
        """To the readers of the mortal mount; odd while it is dead."""
        self.deaths = deaths
        new = self.mortal.work / "deaths.new"
        new.write_text(str(deaths))
        new.replace(self.mortal.work / "deaths")

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

    def kill_mortal(self) -> None:
        """The same in direct mode: the mount is dead until it is mounted again."""
        self._tell_deaths(self.deaths + 1)
        self.mortal.kill()
        time.sleep(self.random.uniform(0, 2))
        self.mortal.mount(HANG_S)
        self._tell_deaths(self.deaths + 1)

    def stop_daemon(self) -> None:
        """It does nothing for a while."""
        pid = self.random.choice([self.find_daemon(), self.direct.pid, self.mortal.pid])
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
        self.server.start(HANG_S)

    def source_down(self) -> None:
        """For a while."""
        relay = self.random.choice(self.relays)
        relay.down()
        time.sleep(self.random.uniform(0.2, 5))
        relay.up()

    def source_silent(self) -> None:
        """For a while."""
        relay = self.random.choice(self.relays)
        relay.silence(True)
        time.sleep(self.random.uniform(0.2, 5))
        relay.silence(False)

    def source_half_open(self) -> None:
        """The connections there are go nowhere any more."""
        self.random.choice(self.relays).half_open()

    def source_faulty(self) -> None:
        """One block of four comes wrong, short, or with a reset."""
        fault = self.random.choice([fault_proxy.wrong_bytes, fault_proxy.short, fault_proxy.reset])
        blocks = 0

        def sometimes(client: "fault_proxy.socket.socket", answer: Answer) -> None:
            nonlocal blocks
            blocks += answer.is_block
            (fault if answer.is_block and blocks % 4 == 0 else fault_proxy.none)(client, answer)

        relay = self.random.choice(self.relays)
        relay.suffer(sometimes)
        time.sleep(self.random.uniform(0.5, 3))
        relay.suffer(fault_proxy.none)

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
        """A byte of a direct mount's warm tier rots. (Under passthrough nobody but the disk could tell.)"""
        warm = self.random.choice([self.direct, self.mortal]).work / "warm"
        objects = [path for path in warm.rglob("objects/*/*") if path.is_file()]
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
            self.kill_daemon, self.kill_daemon, self.kill_mortal, self.stop_daemon, self.restart_daemon,
            self.kill_server, self.source_down, self.source_silent, self.source_half_open, self.source_faulty,
            self.publish, self.publish, self.drop_caches, self.evict, self.warm, self.reload, self.flip,
            self.kill_reader,
        ]  # fmt: skip
        event = self.random.choice(events)
        self.done[event.__name__] += 1
        print(f"{time.strftime('%H:%M:%S')} {event.__name__}", flush=True)
        event()

    # what must hold at the end

    def figures(self) -> dict[str, Figures]:
        """Of each mount and each server; ``all`` is of this soak as a whole."""
        found = {}
        for mounted in self.mounts:
            name = mounted.work.name
            found[name] = process_figures("daemon", self.find_daemon() if mounted is self.channel else mounted.pid)
            if mounted.channel_pid:
                found[name] |= process_figures("channel", mounted.channel_pid)
            device = os.minor(os.stat(mounted.path).st_dev)
            found[name] |= {
                "warm KiB": disk_bytes(mounted.work / "warm") >> 10,
                "state KiB": disk_bytes(mounted.work / "state") >> 10,
                "requests waiting": int(Path(f"/sys/fs/fuse/connections/{device}/waiting").read_text()),
            }
        for name, server in (("server", self.server), ("steady", self.steady)):
            found[name] = process_figures("server", server.process.pid)
            found[name]["state KiB"] = disk_bytes(server.log.parent) >> 10
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found["all"] = {"mounts": sum(f" {self.work}/" in line for line in mounts), "processes": len(self._processes())}
        return found

    def _processes(self) -> list[int]:
        """Servers, daemons and channels, also those that nobody knows any more."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes()
            except OSError:
                continue
            if bytes(self.work) in command and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        return found

    def exported_descriptors(self) -> int:
        """Exported files that a server holds open: at most 256 that nobody reads, for 30 s."""
        links = [link for server in (self.server, self.steady) for link in descriptors(server.process.pid)]
        return sum(link.startswith(f"{self.truth}/") for link in links)

    def rest(self) -> None:
        """No reader is there: wait until nothing is under way."""
        self.find_daemon()
        for mounted in self.mounts:
            eventually(functools.partial(at_rest, mounted), "connected, and no file is open", HANG_S)
        time.sleep(3)

    def begin_anew(self) -> None:
        """Daemons that have a start behind them and not much more, as others have that are killed now and then."""
        self.kill_daemon()
        self.kill_mortal()
        self.rest()


def process_figures(name: str, pid: int) -> Figures:
    """Of one process."""
    status = process_status(pid)
    return {
        f"{name} rss KiB": status["VmRSS"],
        f"{name} descriptors": sum("/objects/" not in link and "/truth/" not in link for link in descriptors(pid)),
        f"{name} threads": status["Threads"],
    }


def make_shards(root: Path) -> None:
    """A model in three files, 38 tensors of several types and shapes."""
    rng = numpy.random.default_rng(24)
    for number, shard in enumerate(SHARDS):
        tensors = {
            f"layers.{layer}.weight": rng.standard_normal((256, 100 + layer), dtype=numpy.float32).astype(type_)
            for layer in range(12)
            for type_ in [(numpy.float32, numpy.float16, numpy.int8)[layer % 3]]
        }
        if number:
            tensors["head"] = rng.standard_normal((1024, 1024 + number), dtype=numpy.float32)
        (root / shard).parent.mkdir(exist_ok=True)
        save_file(tensors, root / shard)


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
    """Readers of every kind on all mounts."""
    commands: list[tuple[str, list[str]]] = []
    for mounted in world.mounts:
        kind = mounted.work.name
        if mounted is world.mortal:
            roles = {"outlive": WEIGHTS, "outlive too": WEIGHTS[:3]}
        else:
            roles = {"read": WEIGHTS, "maps": WEIGHTS[1:4], "pages": WEIGHTS[2:6], "tensors": SHARDS, "find": []}
            roles["churn"] = WEIGHTS
        if kind == "channel":
            roles["list"] = []
        for role, models in roles.items():
            command = [str(LOAD), role.split()[0], str(mounted.path), str(world.truth), str(stop)]
            commands.append((f"{kind} {role}", [*command, str(seed + len(commands)), *models]))
        if mounted is world.mortal:
            continue
        for how in ("read", "map"):
            command = [str(VERSIONS), how, str(mounted.path / PUBLISHED), str(stop), str(world.news)]
            commands.append((f"{kind} versions {how}", [*command, str(SEEN_WITHIN_S)]))
    return commands


def loads(world: World, seed: int, number: int) -> AbstractContextManager[Callable[[], None]]:
    """Those readers, running; see channel_load.running."""
    stop = world.work / f"stop{number}"
    return running(commands_of(world, seed, stop), world.work, stop, HANG_S, others=world.pids)


def compare(name: str, before: Figures, after: Figures) -> list[str]:
    """What is not back where it was; prints both."""
    wrong = []
    for figure, is_ in after.items():
        was = before[figure]
        print(f"  {name:8} {figure:20} {was:>12} {is_:>12}")
        limit = (WARM_BYTES >> 10) * 1.02 if figure == "warm KiB" else was + SLACK[figure]
        if is_ > limit:
            wrong.append(f"{name}: {figure}: was {was} and is {is_}")
    return wrong


def soak(work: Path, minutes: float, seed: int) -> None:
    """Raises AssertionError with what is wrong."""
    quiet_s = max(6.0, minutes * 6)
    rng = random.Random(seed)
    with ExitStack() as stack:
        world = World(work, rng, stack)
        for mounted in world.mounts:
            tierfs("warm", mounted.path / "m1", timeout_s=HANG_S)
        with loads(world, seed, 0) as all_well:
            quiet_end_s = time.monotonic() + quiet_s
            while time.monotonic() < quiet_end_s:
                time.sleep(min(5.0, quiet_s))
                all_well()
        world.begin_anew()
        before = world.figures()
        shown_s = time.monotonic()
        end_s = shown_s + minutes * 60 - quiet_s
        with loads(world, seed, 1) as all_well:
            while time.monotonic() < end_s:
                if time.monotonic() - shown_s > SHOW_S:
                    shown_s = time.monotonic()
                    for name, figures in world.figures().items():
                        print(f"  {name}: {figures}", flush=True)
                    print(f"  exported files open in the servers: {world.exported_descriptors()}", flush=True)
                world.one_event()
                time.sleep(rng.uniform(0.2, 3))
                all_well()
        world.begin_anew()
        if minutes >= 1:  # the short one of the test suite does not wait for it
            eventually(lambda: world.exported_descriptors() == 0, "no server holds an exported file", SERVER_IDLE_S)
        print(f"events: {sum(world.done.values())}, {dict(sorted(world.done.items()))}")
        print(f"versions published: {world.version}")
        after = world.figures()
        wrong = [line for name in after for line in compare(name, before[name], after[name])]
        for mounted in world.mounts:
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

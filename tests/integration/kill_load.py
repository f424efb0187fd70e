"""One reader of the kill tests, a process of its own: ``python kill_load.py ROLE MOUNT TRUTH STOP SEED MODEL...``.

Everything it sees through MOUNT is compared with TRUTH, the exported directory itself. It goes on until the file STOP
is there, and then prints a line of JSON: rounds, the longest wait of one round, bytes compared. Each round touches its
output. Whatever is wrong (another byte, an error, a name too many) ends it at once with a nonzero status and says what.
Run by test_channel_kills.py and the soak.
"""

import hashlib
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

PAGE_BYTES = 4096
MAPS_PER_PROCESS = 8
PAUSE_S = 0.01  # the machine is shared, with the daemon for one


class Load:
    """What every role has."""

    def __init__(self, mount: Path, truth: Path, stop: Path, seed: int, models: list[str]) -> None:
        self.mount = mount
        self.truth = truth
        self.stop = stop
        self.random = random.Random(seed)
        self.models = models
        self.rounds = 0
        self.longest_s = 0.0
        self.checked_bytes = 0
        self.interrupted = 0
        self._begun: dict[int, float] = {}  # the round of each thread

    def repeat(self, round_: Callable[[], None]) -> None:
        """Rounds until told to stop, at least one."""
        while not self.rounds or not self.stop.exists():
            start = time.monotonic()
            self._begun[threading.get_ident()] = time.time()
            oldest = min(self._begun.values())
            os.utime(sys.stdout.fileno(), (oldest, oldest))
            round_()
            self.longest_s = max(self.longest_s, time.monotonic() - start)
            self.rounds += 1
            time.sleep(PAUSE_S)

    def read(self) -> None:
        """Whole models, one after the other, with the pages of the file dropped afterwards."""
        expected = {model: hashlib.sha256((self.truth / model).read_bytes()).hexdigest() for model in self.models}

        def one() -> None:
            model = self.models[self.rounds % len(self.models)]
            found = hashlib.sha256()
            with (self.mount / model).open("rb", buffering=0) as file:
                while piece := file.read(1 << 20):
                    found.update(piece)
                    self.checked_bytes += len(piece)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert found.hexdigest() == expected[model], f"wrong bytes in {model}"

        self.repeat(one)

    def maps(self) -> None:
        """Maps that are held all the time, read again page by page after their pages were dropped."""
        held = []
        for number in range(MAPS_PER_PROCESS):
            model = self.models[number % len(self.models)]
            file = (self.mount / model).open("rb")
            size = os.fstat(file.fileno()).st_size
            view = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED if number % 2 else mmap.MAP_PRIVATE, mmap.PROT_READ)
            if number % 4 == 3:
                file.close()  # the map alone holds it
            held.append((model, file, view, (self.truth / model).read_bytes()))

        def one() -> None:
            model, file, view, bytes_ = self.random.choice(held)
            view.madvise(mmap.MADV_DONTNEED)
            if not file.closed:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for _ in range(20):
                at = self.random.randrange(len(bytes_)) // PAGE_BYTES * PAGE_BYTES
                length = self.random.choice((1, PAGE_BYTES, 64 * PAGE_BYTES))
                assert view[at : at + length] == bytes_[at : at + length], f"wrong bytes in the map of {model} at {at}"
                self.checked_bytes += length

        self.repeat(one)

    def pages(self) -> None:
        """4 KiB here and there, through descriptors that stay open; half of the rounds from cold page caches."""
        files = [
            (model, os.open(self.mount / model, os.O_RDONLY), os.open(self.truth / model, os.O_RDONLY))
            for model in self.models
        ]

        def one() -> None:
            model, descriptor, true = self.random.choice(files)
            pages = os.fstat(true).st_size // PAGE_BYTES + 1
            if self.random.random() < 0.5:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            for _ in range(50):
                at = self.random.randrange(pages) * PAGE_BYTES
                found = os.pread(descriptor, PAGE_BYTES, at)
                assert found == os.pread(true, PAGE_BYTES, at), f"wrong bytes in {model} at {at}"
                self.checked_bytes += len(found)

        self.repeat(one)

    def tensors(self) -> None:
        """All tensors, as safetensors loads them: it maps the file."""
        from safetensors.numpy import load_file  # no other role waits for its import

        def digests(root: Path, model: str) -> dict[str, bytes]:
            loaded = load_file(root / model)
            self.checked_bytes += sum(tensor.nbytes for tensor in loaded.values())
            return {name: hashlib.sha256(tensor.tobytes()).digest() for name, tensor in loaded.items()}

        expected = {model: digests(self.truth, model) for model in self.models}
        self.checked_bytes = 0

        def one() -> None:
            model = self.models[self.rounds % len(self.models)]
            assert digests(self.mount, model) == expected[model], f"other tensors in {model}"
            with (self.mount / model).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        self.repeat(one)

    def outlive(self) -> None:
        """Whole models, read or mapped, while the mount dies and is mounted again.

        The file ``deaths`` beside the mount counts: odd means dead. Errors, and SIGBUS, may come where it has changed.
        """
        deaths = self.mount.with_name("deaths")

        def look(model: str, mapped: bool) -> bool:
            with (self.mount / model).open("rb") as file:
                true = (self.truth / model).read_bytes()
                if mapped:
                    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
                        return view[:] == true
                return file.read() == true

        def one() -> None:
            before = int(deaths.read_text())
            if before % 2:
                return
            model, mapped = self.random.choice(self.models), self.random.random() < 0.5
            child = os.fork()  # SIGBUS is the end of a process
            if child == 0:
                status = 3
                try:
                    status = 0 if look(model, mapped) else 1
                except OSError as error:
                    status = 2
                    if int(deaths.read_text()) == before:
                        print(f"{model}: {error}", file=sys.stderr, flush=True)
                finally:
                    os._exit(status)
            _, waited = os.waitpid(child, 0)
            status = os.waitstatus_to_exitcode(waited)
            if status == 0:
                self.checked_bytes += (self.truth / model).stat().st_size
                return
            assert status in (2, -signal.SIGBUS), f"wrong bytes in {model}, or see above: {status}"
            assert int(deaths.read_text()) != before, f"{model} failed with {status} in a living mount"
            self.interrupted += 1

        self.repeat(one)

    def find(self) -> None:
        """The whole tree: names, kinds, sizes, where symlinks point, and the bytes of some files."""
        expected = tree_of(self.truth / "tree")

        def one() -> None:
            assert tree_of(self.mount / "tree") == expected, "another tree"
            for name in self.random.sample(sorted(expected), 10):
                path = self.mount / "tree" / name
                if path.is_file():
                    assert path.read_bytes() == (self.truth / "tree" / name).read_bytes(), f"wrong bytes in {name}"
                    self.checked_bytes += path.lstat().st_size
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        self.repeat(one)

    def list(self) -> None:
        """Large directories, some listings pausing half-way."""
        expected = sorted(os.listdir(self.truth / "many"))

        def one() -> None:
            names = []
            pause_at = self.random.randrange(2 * len(expected))
            with os.scandir(self.mount / "many") as entries:
                for position, entry in enumerate(entries):
                    names.append(entry.name)
                    if position == pause_at:
                        time.sleep(1.0)
            assert sorted(names) == expected, f"{len(names)} names instead of {len(expected)}"

        self.repeat(one)

    def churn(self) -> None:
        """Two threads that open and close; what is not there must stay not there."""
        names = [*self.models, *sorted(name for name, kind in tree_of(self.truth / "tree").items() if kind[0] == "f")]
        paths = [name if name in self.models else f"tree/{name}" for name in names]
        failed: list[BaseException] = []

        def one() -> None:
            path = self.mount / self.random.choice(paths)
            with path.open("rb", buffering=0) as file:
                if self.random.random() < 0.3:
                    size = os.fstat(file.fileno()).st_size
                    expected = tail(self.truth / path.relative_to(self.mount))
                    assert os.pread(file.fileno(), 10, max(0, size - 3)) == expected, f"wrong end of {path}"
            assert not path.with_name(f"none-{self.rounds}").exists()

        def run() -> None:
            try:
                self.repeat(one)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


def tail(path: Path) -> bytes:
    """The last three bytes of a file, or as many as there are."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 3))
        return file.read()


def tree_of(root: Path) -> dict[str, tuple[str, object]]:
    """Every name below a directory, and what it is."""
    found: dict[str, tuple[str, object]] = {}

    def fail(error: OSError) -> None:
        raise error

    for directory, directories, files in os.walk(root, onerror=fail):
        for name in directories + files:
            path = Path(directory) / name
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = ("l", os.readlink(path))
            elif path.is_dir():
                found[key] = ("d", None)
            else:
                found[key] = ("f", path.lstat().st_size)
    return found


def main() -> None:
    role, mount, truth, stop, seed, *models = sys.argv[1:]
    load = Load(Path(mount), Path(truth), Path(stop), int(seed), models)
    roles: dict[str, Callable[[], None]] = {
        "read": load.read, "maps": load.maps, "find": load.find, "list": load.list, "churn": load.churn,
        "pages": load.pages, "tensors": load.tensors, "outlive": load.outlive,
    }  # fmt: skip
    roles[role]()
    told = {"rounds": load.rounds, "longest_s": round(load.longest_s, 2), "checked_bytes": load.checked_bytes}
    print(json.dumps(told | ({"interrupted": load.interrupted} if load.interrupted else {})))


if __name__ == "__main__":
    main()

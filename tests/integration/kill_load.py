"""One reader of the kill tests, a process of its own: ``python kill_load.py ROLE MOUNT TRUTH STOP SEED MODEL...``.

Everything it sees through MOUNT is compared with TRUTH, the exported directory itself. It goes on until the file STOP
is there, and then prints a line of JSON: rounds, and the longest wait of one round. Whatever is wrong (another byte, an
error, a name too many) ends it at once with a nonzero status and says what. Run by test_channel_kills.py and the soak.
"""

import hashlib
import json
import mmap
import os
import random
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

    def repeat(self, round_: Callable[[], None]) -> None:
        """Rounds until told to stop."""
        while not self.stop.exists():
            start = time.monotonic()
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
    }  # fmt: skip
    roles[role]()
    print(json.dumps({"rounds": load.rounds, "longest_s": round(load.longest_s, 2)}))


if __name__ == "__main__":
    main()

"""How fast this processor's time-stamp counter runs: an emulated guest reads the very same counter.

The guest's kernel would measure it against an emulated timer while it boots. On a busy host that comes out several
times too small, and then all of the guest's clocks run too fast. qemu.py tells it the number instead.
"""

import functools
import subprocess
import tempfile
from pathlib import Path

_PROGRAM = """
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
int main(void) {
    for (int i = 0; i < 7; i++) {
        double begun = now();
        unsigned long long counter = __rdtsc();
        struct timespec pause = {0, 40 * 1000 * 1000};
        nanosleep(&pause, 0);
        counter = __rdtsc() - counter;
        printf("%.0f\\n", counter / (now() - begun));
    }
}
"""


@functools.cache
def counter_khz() -> int:
    """Ticks of the counter in a millisecond; 0 where it cannot be measured."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "tsc"
        try:
            subprocess.run(
                ["gcc", "-O1", "-x", "c", "-", "-o", str(program)],
                input=_PROGRAM, text=True, check=True, capture_output=True, timeout=60,
            )  # fmt: skip
            done = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return 0
    measured = sorted(int(line) for line in done.stdout.split())
    return measured[len(measured) // 2]

"""Whether a pool file can be opened without harm. Called by pool.py before every open.

libpmemobj believes what it finds: a pool whose file was cut off makes pmemobj_open and pmemobj_check run into SIGSEGV
or SIGBUS. So the check runs in a child process, which may die of it; a daemon never does, nor again at each restart.
The child reads the file before it is mapped: there a bad block is EIO, and no SIGBUS.
"""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

from tierfs.tiers.pmem.library import PmemError, load

_CHECK_S = 60.0  # some ten milliseconds for a pool of 100 MB; a test machine under emulation takes seconds to start it

# Exit status: 0 consistent, 1 not; 2 not found out: stderr has the errno and the message.
_CHILD = """
import ctypes, os, sys
path, layout = map(os.fsencode, sys.argv[1:])
def tell(number, message):
    os.write(2, b"%d %s" % (number, message))
    os._exit(2)
try:
    with open(path, "rb", buffering=0) as pool:
        while pool.read(1 << 20):
            pass
except OSError as error:
    tell(error.errno, os.fsencode(error.strerror))
library = ctypes.CDLL("libpmemobj.so.1", use_errno=True)
library.pmemobj_errormsg.restype = ctypes.c_char_p
consistent = library.pmemobj_check(path, layout)
if consistent < 0:
    tell(ctypes.get_errno(), library.pmemobj_errormsg())
os._exit(0 if consistent else 1)
"""


def check(path: Path, layout: str) -> bool:
    """Whether a pool that nobody has open is consistent: pmemobj_check(3), in a child process. It is not changed.

    Raises PmemError when that cannot be found out: EAGAIN while somebody has it open, EINVAL for another layout or no
    pool at all, EIO for a bad block, ENOENT, EACCES, ETIMEDOUT. TierFailed when the library is missing.
    """
    load()
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD, os.fsencode(path), layout],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_CHECK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise PmemError(errno.ETIMEDOUT, f"the check took longer than {_CHECK_S:.0f} s", str(path)) from error
    if child.returncode in (0, 1):
        return child.returncode == 0
    if child.returncode < 0:
        cause = signal.Signals(-child.returncode).name
        raise PmemError(errno.EINVAL, f"the check died of {cause}: the pool is damaged or cut off", str(path))
    number, _, message = child.stderr.decode("utf-8", "replace").partition(" ")
    if not number.isdigit():  # the child could not even run
        raise PmemError(errno.EIO, f"the pool cannot be checked: {child.stderr[-200:]!r}", str(path))
    if int(number) == errno.EAGAIN:
        message = "it is open already, in another process or in this one"
    raise PmemError(int(number) or errno.EIO, f"the pool cannot be used: {message}", str(path))

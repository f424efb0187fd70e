"""Which shard of a model a loader opens after this one, told from names alone.

The file system asks when a stream nears the end of a file. In a hub cache the file that was opened is a blob whose name
says nothing: the names to ask about are the symlinks' in snapshots/REV.

What must hold: the answer exists, depends on nothing but the arguments, and has a larger number than the question, so
that going on from shard to shard ends.
"""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

# model-00001-of-00004.safetensors, pytorch_model-00001-of-00003.bin, Q4_K_M-00001-of-00003.gguf, and TensorFlow's
# variables.data-00000-of-00002, which counts from zero.
_PART_OF = re.compile(
    rb"(?P<before>.*?)(?<![0-9])(?P<number>[0-9]{1,9})(?P<after>-of-(?P<total>[0-9]{1,9})(?:\..*)?)", re.DOTALL
)
# consolidated.00.pth, layer_0.npz, part-3.bin: a number set off by a separator right before the extension. A number
# that is stuck to a word is a version (adapter_v2.bin), not a shard.
_NUMBERED = re.compile(rb"(?P<before>.*[-_.])(?P<number>[0-9]{1,9})(?P<after>\.[A-Za-z][A-Za-z0-9]*)", re.DOTALL)
# Only -of- makes shards of these: model-Q4_0.gguf and model-Q4_1.gguf are the same weights twice.
_NEVER_NUMBERED = (b".gguf", b".ggml")


def following_shard(name: bytes, siblings: Sequence[bytes] | AbstractSet[bytes]) -> bytes | None:
    """The name of the shard after ``name``, if it is among ``siblings`` (the names in its directory); else None.

    Constant time with a set, one pass with a sequence, and neither for a name that is no shard.
    """
    match = _PART_OF.fullmatch(name)
    if match is not None:
        number = int(match["number"]) + 1
        if number > int(match["total"]):
            return None
    else:
        match = _NUMBERED.fullmatch(name)
        if match is None or match["after"].lower() in _NEVER_NUMBERED:
            return None
        number = int(match["number"]) + 1
    # 9 is followed by 10, and 09 by 10 too.
    digits = b"%0*d" % (len(match["number"]), number)
    following = match["before"] + digits + match["after"]
    return following if following in siblings else None

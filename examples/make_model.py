"""Writes a sharded safetensors model of random weights, as a Hugging Face hub cache or as a plain directory.

    python examples/make_model.py --size 1GiB [--hub] [--seed 1] DIRECTORY

The files are what a real one has: config.json, model.safetensors.index.json and model-0000i-of-0000N.safetensors. With
--hub they are blobs, and snapshots/<revision>/ holds symlinks to them. Prints the directory that a loader would open.
"""

import argparse
import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

WIDTH = 4096  # of every tensor; a row of F16 is 8 KiB
ROW_BYTES = WIDTH * 2
TENSOR_ROWS = 4096  # 32 MiB
SHARD_BYTES = 256 << 20
SHARDS_MAX = 16
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}


def size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MiB|GiB|MB|GB)", text)
    if match is None or float(match[1]) * UNITS[match[2]] < 2 * ROW_BYTES:
        raise argparse.ArgumentTypeError(f'{text!r} is not a size; expected something like "64MiB" or "1GiB"')
    return int(float(match[1]) * UNITS[match[2]])


def random_blocks(total_bytes: int, generator: "np.random.SFC64") -> Iterator[memoryview]:
    """Random bytes at memory speed: one random chunk, each time combined with another random word."""
    chunk = generator.random_raw(1 << 20)  # 8 MiB
    scratch = np.empty_like(chunk)
    while total_bytes > 0:
        np.multiply(chunk, generator.random_raw() | 1, out=scratch)
        np.bitwise_xor(scratch, generator.random_raw(), out=scratch)
        part = memoryview(scratch).cast("B")[:total_bytes]
        yield part
        total_bytes -= len(part)


def tensors_of(total_bytes: int) -> list[tuple[str, int]]:
    """Names and rows of the tensors that make up that size, the last one smaller."""
    rows = max(2, total_bytes // ROW_BYTES)
    count = max(2, -(-rows // TENSOR_ROWS))
    each, more = divmod(rows, count)
    return [(f"model.layers.{i}.mlp.weight", each + (i < more)) for i in range(count)]


def write_shard(path: Path, tensors: list[tuple[str, int]], generator: "np.random.SFC64") -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, rows in tensors:
        end = offset + rows * ROW_BYTES
        header[name] = {"dtype": "F16", "shape": [rows, WIDTH], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for block in random_blocks(offset, generator):
            file.write(block)
    return offset


def make_model(directory: Path, total_bytes: int, *, hub: bool, seed: int) -> Path:
    """Write the model; the directory to load it from."""
    generator = np.random.SFC64(seed)
    tensors = tensors_of(total_bytes)
    count = min(len(tensors), SHARDS_MAX, max(2, round(total_bytes / SHARD_BYTES)))
    revision = hashlib.sha1(f"{total_bytes} {seed}".encode()).hexdigest()
    model = directory / "snapshots" / revision if hub else directory
    blobs = directory / "blobs"
    for folder in (model, blobs, directory / "refs") if hub else (model,):
        folder.mkdir(parents=True, exist_ok=True)
    if hub:
        (directory / "refs/main").write_text(revision)

    def place(name: str) -> Path:
        """Where the file of that name is written: in the hub's layout a blob that the name links to."""
        if not hub:
            return model / name
        blob = hashlib.sha256(f"{revision} {name}".encode()).hexdigest()
        (model / name).symlink_to(f"../../blobs/{blob}")
        return blobs / blob

    weight_map: dict[str, str] = {}
    written = 0
    for shard in range(count):
        name = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        mine = tensors[shard * len(tensors) // count : (shard + 1) * len(tensors) // count]
        written += write_shard(place(name), mine, generator)
        weight_map |= {tensor: name for tensor, _ in mine}
    index = {"metadata": {"total_size": written}, "weight_map": weight_map}
    place("model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {"architectures": ["RandomWeights"], "hidden_size": WIDTH, "num_hidden_layers": len(tensors)}
    place("config.json").write_text(json.dumps(config, indent=2))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", type=size_bytes, default="1GiB")
    parser.add_argument("--hub", action="store_true", help="the layout of a Hugging Face hub cache")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.directory.exists() and any(arguments.directory.iterdir()):
        sys.exit(f"make_model: {arguments.directory} is not empty; name a new directory")
    print(make_model(arguments.directory, arguments.size, hub=arguments.hub, seed=arguments.seed))


if __name__ == "__main__":
    main()

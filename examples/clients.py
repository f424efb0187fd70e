"""One load of one model by its real client, in a process of its own: python examples/clients.py CLIENT DIRECTORY

Prints one line of JSON: the seconds from the first open to the last byte used (imports not counted), and what came
out of it, tensor by tensor or output by output, so that two loads can be compared. Called by load_models.py.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash


def load_safetensors(directory: Path) -> Callable[[], dict[str, str]]:
    """Every tensor of every shard, as a framework gets it."""
    from safetensors import safe_open

    def load() -> dict[str, str]:
        index = directory / "model.safetensors.index.json"
        if index.exists():
            shards = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            shards = sorted(directory.glob("*.safetensors"))
        found: dict[str, str] = {}
        for shard in shards:
            with safe_open(shard, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open cannot be iterated
                    tensor = file.get_tensor(name)
                    found[name] = f"{tensor.dtype} {tensor.shape} {_digest(tensor)}"
        return found

    return load


def load_gguf(directory: Path) -> Callable[[], dict[str, str]]:
    """llama.cpp loads the model and goes on with a sentence, greedily; then gguf maps the file, for every tensor."""
    import gguf
    import xllamacpp

    (path,) = directory.glob("*.gguf")

    def load() -> dict[str, str]:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = 256
        parameters.n_parallel = 1
        parameters.warmup = False
        parameters.cpuparams.n_threads = min(4, os.cpu_count() or 1)
        server = xllamacpp.Server(parameters)
        prompt = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "seed": 1}
        answer = server.handle_completions(prompt)
        found = {"text": answer["choices"][0]["text"]}
        for tensor in gguf.GGUFReader(path).tensors:
            found[tensor.name] = f"{tensor.tensor_type} {list(tensor.shape)} {_digest(tensor.data)}"
        return found

    return load


def load_onnx(directory: Path) -> Callable[[], dict[str, str]]:
    """A session and one inference on fixed inputs."""
    import onnxruntime

    (path,) = directory.glob("*.onnx")

    def load() -> dict[str, str]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # a sum in another order would be another float
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs = {node.name: _example_input(node.name, node.type, node.shape) for node in session.get_inputs()}
        outputs = session.run(None, inputs)
        names = [node.name for node in session.get_outputs()]
        return {name: f"{out.shape} {_digest(out)}" for name, out in zip(names, outputs, strict=True)}

    return load


CLIENTS = {"safetensors": load_safetensors, "llama.cpp + gguf": load_gguf, "onnxruntime": load_onnx}


def _digest(array: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


def _example_input(name: str, kind: str, shape: list[int | str | None]) -> np.ndarray:
    """Something of the right type and shape; free dimensions are 1 (batch) and then 512 samples or 16 tokens."""
    if not shape:
        return np.array(16000, dtype=np.int64)  # a sample rate
    free = 512 if kind == "tensor(float)" else 16
    sizes = [
        size if isinstance(size, int) else (free if axis == len(shape) - 1 else 1) for axis, size in enumerate(shape)
    ]
    if kind == "tensor(float)":
        return np.linspace(-1, 1, num=int(np.prod(sizes)), dtype=np.float32).reshape(sizes)
    return np.full(sizes, 0 if name == "token_type_ids" else 1, dtype=np.int64)


def main() -> None:
    client, directory = sys.argv[1], Path(sys.argv[2])
    load = CLIENTS[client](directory)
    started = time.perf_counter()
    found = load()
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "found": found}), flush=True)
    os._exit(0)  # without the clients' own winding down, which is not what is looked at


if __name__ == "__main__":
    main()

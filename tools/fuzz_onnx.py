"""Fuzz target of the ONNX reader: the model file and its configuration, up to the sessions.

python -m tools.fuzz_onnx --seconds 60 [--corpus DIR]

An input is a model file, or the configuration of a correct one where it begins like JSON. Opening
it must succeed or raise an error of edgeh2o; onnxruntime, which is not ours, is not started.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.fuzz_loop import instrumented_imports, run_fuzzer
from tools.make_tiny_model import write_tiny_model

with instrumented_imports():
    from edgeh2o.export.onnx import CONFIG_NAME, MODEL_NAME, export_model
    from edgeh2o.onnx.model import OnnxModelFile

SIZES: dict[str, object] = {
    "n_layers": 2,
    "model_dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 64,
    "context_length": 64,
    "tensor_type": "Q4_0",
}


def make_seeds(folder: Path) -> list[bytes]:
    """Exports a small model to ``folder``; its model file and its configuration."""
    export_model(write_tiny_model(folder.with_suffix(".gguf"), **SIZES), folder)
    return [(folder / name).read_bytes() for name in (MODEL_NAME, CONFIG_NAME)]


def make_target(folder: Path) -> Callable[[bytes], None]:
    """Opens the model in ``folder`` with an input in the place of one of its files."""
    originals = {name: (folder / name).read_bytes() for name in (MODEL_NAME, CONFIG_NAME)}

    def read(content: bytes) -> None:
        name = CONFIG_NAME if content[:1] == b"{" else MODEL_NAME
        (folder / name).write_bytes(content)
        try:
            with OnnxModelFile(folder):
                pass
        finally:
            (folder / name).write_bytes(originals[name])

    return read


def main() -> int:
    """Command line entry; returns the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        seeds = make_seeds(folder)
        return run_fuzzer(make_target(folder), seeds, name="fuzz_onnx")


if __name__ == "__main__":
    raise SystemExit(main())

"""Looks for damaged ONNX files that end in anything but one clear error.

    python -m tools.fuzz_onnx --seconds 60 --seed 1

Bytes of the model file of a tiny model, and of its configuration, are changed at random; opening it
must succeed or raise an error of edgeh2o. onnxruntime, which is not ours, is not started.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from edgeh2o.errors import EdgeH2OError
from edgeh2o.export.onnx import CONFIG_NAME, MODEL_NAME, export_model
from edgeh2o.onnx.model import OnnxModelFile
from tools.make_tiny_model import write_tiny_model

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


def damage(data: bytes, rng: random.Random) -> bytes:
    """A copy with a few bytes changed, removed, doubled or cut off."""
    copy = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(copy))
        kind = rng.random()
        if kind < 0.6:
            copy[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind < 0.75:
            del copy[at : at + rng.randint(1, 8)]
        elif kind < 0.9:
            copy[at:at] = copy[at : at + rng.randint(1, 8)]
        else:
            del copy[at + 1 :]
    return bytes(copy)


def fuzz(seconds: float, seed: int, limit: int | None = None) -> tuple[int, int]:
    """(cases tried, cases refused). Any other outcome raises."""
    rng = random.Random(seed)
    n_tried = n_refused = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        export_model(write_tiny_model(Path(name) / "tiny.gguf", **SIZES), folder)
        originals = {file: (folder / file).read_bytes() for file in (MODEL_NAME, CONFIG_NAME)}
        end = time.monotonic() + seconds
        while time.monotonic() < end and (limit is None or n_tried < limit):
            file = MODEL_NAME if rng.random() < 0.85 else CONFIG_NAME
            damaged = damage(originals[file], rng)
            (folder / file).write_bytes(damaged)
            n_tried += 1
            try:
                with OnnxModelFile(folder):
                    pass
            except EdgeH2OError:
                n_refused += 1
            except BaseException:
                sample = Path(tempfile.gettempdir()) / f"fuzz_onnx_{seed}_{n_tried}_{file}"
                sample.write_bytes(damaged)
                print(f"fuzz_onnx: case {n_tried} of seed {seed}: {sample}", file=sys.stderr)
                raise
            (folder / file).write_bytes(originals[file])
    return n_tried, n_refused


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="fuzz_onnx", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    n_tried, n_refused = fuzz(args.seconds, args.seed)
    print(f"{n_tried} files opened, {n_refused} refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())

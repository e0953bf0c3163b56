"""Records vectors of a text by llama-embedding for tiny models of tests/golden/embeddings.

    python -m tools.update_embedding_goldens path/to/llama.cpp/build/bin [CASE ...]

Every file holds what llama.cpp makes of the text by each pooling, without a norm, and how many
rows that are is printed: one of a pooling, or one a token where nothing is pooled;
tests/golden/embeddings/versions.json says which llama.cpp made it. ``llama-embedding`` is an
example: configure llama.cpp with ``-DLLAMA_BUILD_EXAMPLES=ON``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.llama_cpp import LlamaCpp
from tests.embedding_cases import CASES, FOLDER, POOLINGS, TEXT, options_of
from tools.make_tiny_model import write_tiny_model
from tools.record_goldens import record_cases


def record(llama_cpp: LlamaCpp, case: str, folder: Path) -> None:
    """Writes ``folder/case.npz``. Raises LlamaCppError if llama.cpp does not run the model."""
    with tempfile.TemporaryDirectory(prefix="edgeh2o-golden-") as scratch:
        model = write_tiny_model(Path(scratch) / "tiny.gguf", **options_of(case))
        vectors = {
            pooling: llama_cpp.embed(model, TEXT, pooling=None if pooling == "default" else pooling)
            for pooling in POOLINGS
        }
    arrays = {name: np.array(rows, np.float32) for name, rows in vectors.items()}
    np.savez_compressed(folder / f"{case}.npz", **arrays)  # type: ignore[arg-type]
    counts = ", ".join(f"{pooling} {len(rows)}" for pooling, rows in arrays.items())
    print(f"{case}: {sum(map(len, arrays.values()))} rows ({counts})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    return record_cases(
        arguments,
        prog="update_embedding_goldens",
        description=__doc__.split("\n")[0],
        cases=CASES,
        folder=FOLDER,
        record=record,
    )


if __name__ == "__main__":
    raise SystemExit(main())

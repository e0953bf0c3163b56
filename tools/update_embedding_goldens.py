"""Records vectors of a text by llama-embedding for tiny models of tests/golden/embeddings.

    python -m tools.update_embedding_goldens path/to/llama.cpp/build/bin [CASE ...]

Every file holds what llama.cpp makes of the text by each pooling, without a norm;
tests/golden/embeddings/versions.json says which llama.cpp made it. ``llama-embedding`` is an
example: configure llama.cpp with ``-DLLAMA_BUILD_EXAMPLES=ON``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.errors import LlamaCppError
from bench.llama_cpp import LlamaCpp
from tests.embedding_cases import CASES, FOLDER, POOLINGS, TEXT, options_of
from tools.make_tiny_model import write_tiny_model


def record(llama_cpp: LlamaCpp, case: str) -> None:
    """Writes the file of a case. Raises LlamaCppError if llama.cpp does not run the model."""
    with tempfile.TemporaryDirectory(prefix="edgeh2o-golden-") as scratch:
        model = write_tiny_model(Path(scratch) / "tiny.gguf", **options_of(case))
        vectors = {
            pooling: llama_cpp.embed(model, TEXT, pooling=None if pooling == "default" else pooling)
            for pooling in POOLINGS
        }
    arrays = {name: np.array(rows, np.float32) for name, rows in vectors.items()}
    np.savez_compressed(FOLDER / f"{case}.npz", **arrays)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="update_embedding_goldens", description=__doc__.split("\n")[0]
    )
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("cases", nargs="*", help="default: all", metavar="CASE")
    options = parser.parse_args(arguments)
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    llama_cpp = LlamaCpp(options.llama_cpp, threads=2)
    FOLDER.mkdir(exist_ok=True)
    versions_file = FOLDER / "versions.json"
    versions = json.loads(versions_file.read_text()) if versions_file.is_file() else {}
    try:
        version = llama_cpp.version()
        for case in options.cases or CASES:
            record(llama_cpp, case)
            versions[case] = version
    except (OSError, LlamaCppError) as error:
        print(f"update_embedding_goldens: error: {error}", file=sys.stderr)
        return 1
    versions_file.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Records ranks of documents by llama-embedding for tiny models, in tests/golden/ranks.json.

    python -m tools.update_rank_goldens path/to/llama.cpp/build/bin

Of every document the probabilities of all labels. ``llama-embedding`` is an example: configure
llama.cpp with ``-DLLAMA_BUILD_EXAMPLES=ON``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.errors import LlamaCppError
from bench.llama_cpp import LlamaCpp
from tests.rank_cases import CASES, DOCUMENTS, FILE, QUERY
from tools.make_tiny_model import write_tiny_model


def record(llama_cpp: LlamaCpp, case: str) -> list[list[float]]:
    """The probabilities of a case. Raises LlamaCppError if llama.cpp does not run the model."""
    with tempfile.TemporaryDirectory(prefix="edgeh2o-golden-") as scratch:
        model = write_tiny_model(Path(scratch) / "tiny.gguf", **CASES[case])
        pairs = [f"{QUERY}\t{document}" for document in DOCUMENTS]
        return [llama_cpp.embed(model, pair, pooling="rank")[0] for pair in pairs]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="update_rank_goldens", description=__doc__.split("\n")[0])
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's programs")
    options = parser.parse_args(arguments)
    llama_cpp = LlamaCpp(options.llama_cpp, threads=2)
    try:
        golden: dict[str, object] = {case: record(llama_cpp, case) for case in CASES}
        golden["version"] = llama_cpp.version()
    except (OSError, LlamaCppError) as error:
        print(f"update_rank_goldens: error: {error}", file=sys.stderr)
        return 1
    FILE.write_text(json.dumps(golden, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

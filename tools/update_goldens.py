"""Records log-probabilities of llama.cpp for the tiny models of tests/golden.

    python -m tools.update_goldens path/to/llama.cpp/build/bin [CASE ...]

Every file holds the tokens, some positions, and the log-probabilities of the whole vocabulary at
them; tests/golden/versions.json says which llama.cpp made it.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.errors import LlamaCppError
from bench.llama_cpp import LlamaCpp
from tests.model.golden_cases import CASES, CONTEXT, POSITION_STEP, options_of
from tools.make_tiny_model import write_tiny_model

FOLDER = Path(__file__).parent.parent / "tests" / "golden"


def random_text(n_characters: int) -> str:
    """Letters and spaces, the same every time: about one token per character."""
    return "".join(random.Random(0).choices(string.ascii_letters + "    ", k=n_characters))


def record(llama_cpp: LlamaCpp, case: str, folder: Path) -> None:
    """Writes ``folder/case.npz``. Raises LlamaCppError if llama.cpp does not run the model."""
    with tempfile.TemporaryDirectory(prefix="edgeh2o-golden-") as scratch:
        model = write_tiny_model(Path(scratch) / "tiny.gguf", **options_of(case))
        saved = llama_cpp.log_probabilities(
            model, random_text(4 * CONTEXT), context_size=CONTEXT, n_windows=1, cache_type="f32"
        )
    rows = saved.log_probabilities(0)[::POSITION_STEP]
    positions = saved.first_scored + POSITION_STEP * np.arange(len(rows), dtype=np.int32)
    np.savez_compressed(
        folder / f"{case}.npz",
        tokens=saved.tokens[0],
        positions=positions,
        log_probabilities=rows,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="update_goldens", description=__doc__.split("\n")[0])
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("cases", nargs="*", help="default: all", metavar="CASE")
    options = parser.parse_args(arguments)
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    llama_cpp = LlamaCpp(options.llama_cpp, threads=2)
    versions_file = FOLDER / "versions.json"
    versions = json.loads(versions_file.read_text()) if versions_file.is_file() else {}
    try:
        version = llama_cpp.version()
        for case in options.cases or CASES:
            record(llama_cpp, case, FOLDER)
            versions[case] = version
    except (OSError, LlamaCppError) as error:
        print(f"update_goldens: error: {error}", file=sys.stderr)
        return 1
    versions_file.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

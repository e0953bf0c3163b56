"""Records log-probabilities of llama.cpp for the tiny models of tests/golden.

    python -m tools.update_goldens path/to/llama.cpp/build/bin [CASE ...]

Every file holds the tokens, some positions, and the log-probabilities of the whole vocabulary at
them; tests/golden/versions.json says which llama.cpp made it.
"""

from __future__ import annotations

import random
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.llama_cpp import LlamaCpp
from tests.model.golden_cases import CASES, CONTEXT, POSITION_STEP, options_of
from tools.make_tiny_model import write_tiny_model
from tools.record_goldens import record_cases

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
    return record_cases(
        arguments,
        prog="update_goldens",
        description=__doc__.split("\n")[0],
        cases=CASES,
        folder=FOLDER,
        record=record,
    )


if __name__ == "__main__":
    raise SystemExit(main())

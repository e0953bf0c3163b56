"""The cold start comparison: failures are told apart from results, medians make the ratios."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from bench.errors import LlamaCppError
from bench.llama_cpp import LlamaCpp
from bench.load import (
    MIB,
    RSS_UNIT_BYTES,
    LoadMeasurement,
    ProcessCost,
    cut_prompt,
    format_table,
    run_to_first_byte,
)
from tests.bench.programs import install
from tests.bench.tables import cells_of


def test_a_child_larger_than_this_process_is_measured() -> None:
    own_peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES
    n_bytes = own_peak_bytes + 32 * MIB
    cost = run_to_first_byte(
        [sys.executable, "-c", f"x = b'x' * {n_bytes}; print(len(x))"], os.environ
    )
    assert cost.peak_rss_bytes > n_bytes
    assert cost.first_token_s > 0


def test_a_child_smaller_than_this_process_gives_no_result() -> None:
    with pytest.raises(LlamaCppError, match="larger than the measured one"):
        run_to_first_byte(["echo", "token"], os.environ)


@pytest.mark.parametrize(
    ("script", "message"),
    [("echo token; echo reason >&2; exit 4", "code 4\nreason"), ("exit 0", "ended with code 0")],
)
def test_a_failure_or_an_empty_answer_is_an_error(script: str, message: str) -> None:
    with pytest.raises(LlamaCppError, match=message):
        run_to_first_byte(["sh", "-c", script], os.environ)


def test_the_prompt_is_the_shortest_with_enough_tokens(tmp_path: Path) -> None:
    """The stand-in tokenizer counts words."""
    script = """while [ "$1" != -f ]; do shift; done
    echo "[$(tr -s ' ' '\\n' < "$2" | grep -c . | xargs seq -s, 1)]" """
    install(tmp_path, "llama-tokenize", script)
    peer = LlamaCpp(tmp_path, threads=1)
    text = "one two three four five"
    assert cut_prompt(peer, Path("m.gguf"), text, 3) == "one two t"
    with pytest.raises(LlamaCppError, match="less than 6 tokens"):
        cut_prompt(peer, Path("m.gguf"), text, 6)


def test_ratios_are_ours_over_theirs() -> None:
    measurement = LoadMeasurement(
        model="m.gguf",
        backend="haswell",
        isa="avx2",
        threads=2,
        prompt_tokens=16,
        ours=[ProcessCost(0.5, 100 * MIB), ProcessCost(0.9, 100 * MIB), ProcessCost(0.5, MIB)],
        theirs=[ProcessCost(1.0, 400 * MIB)],
    )
    row = format_table([measurement]).splitlines()[2]
    cells = cells_of(row)
    assert cells[4] == "0.50 (0.50 to 0.90)"
    assert (cells[6], cells[9]) == ("0.50x", "0.25x")

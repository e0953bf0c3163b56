"""The comparison at the sizes that people run: files that are made, rates, and ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.errors import LlamaCppError
from bench.load import MIB
from bench.shapes import (
    IK_LLAMA_CPP,
    LLAMA_CPP,
    OURS,
    Run,
    ShapeMeasurement,
    build_parser,
    find_or_make,
    format_tables,
    make_contestants,
    parse_rates,
)
from tests.bench.programs import install
from tests.bench.tables import cells_of


def test_a_file_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "llama-3.2-1b-q4_k_m.gguf"
    path.write_bytes(b"as it is")
    assert find_or_make(tmp_path, "llama-3.2-1b", "Q4_K_M") == path
    assert path.read_bytes() == b"as it is"


def test_an_unknown_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match="llama-9b is not one of"):
        find_or_make(tmp_path, "llama-9b", "Q4_K_M")


def test_rates_are_those_of_prefill_and_decode() -> None:
    theirs = [{"avg_ts": 200.5, "n_prompt": 512}, {"avg_ts": 20, "n_gen": 64}]
    assert parse_rates(json.dumps(theirs), "avg_ts") == (200.5, 20)
    ours = {"machine": {}, "results": [{"median_tps": 3}, {"median_tps": 1}]}
    assert parse_rates(json.dumps(ours), "median_tps") == (3, 1)


@pytest.mark.parametrize("output", ["", "[]", '[{"avg_ts": 1}]', "{}", '[{"a": 1}, {"b": 2}]'])
def test_anything_else_is_an_error(output: str) -> None:
    with pytest.raises(LlamaCppError, match="expected a test of prefill and one of decode"):
        parse_rates(output, "avg_ts")


def test_the_peers_are_asked_for_the_same_tests(tmp_path: Path) -> None:
    """The stand-ins say what they were given, as llama-bench would not."""
    script = """for a in "$@"; do printf '%s ' "$a" >&2; done; exit 3"""
    install(tmp_path, "llama-bench", script)
    folder = str(tmp_path)
    args = build_parser().parse_args(
        [folder, "--llama-cpp", folder, "--ik-llama-cpp", folder, "-n", "8", "--no-warmup"]
    )
    contestants = make_contestants(Path("m.gguf"), 512, "avx2", args)
    assert list(contestants) == [OURS, LLAMA_CPP, IK_LLAMA_CPP]
    common = "-m m.gguf -p 512 -n 8 -t 2 -r 1 -o json -fa 1"
    with pytest.raises(LlamaCppError, match=f"{common} --no-warmup"):
        contestants[LLAMA_CPP]()
    with pytest.raises(LlamaCppError, match=f"{common} -rtr 1 -w 0"):
        contestants[IK_LLAMA_CPP]()


def test_ratios_are_of_medians_ours_over_theirs() -> None:
    measurement = ShapeMeasurement(
        shape="llama-3.2-1b",
        type="Q6_K",
        isa="avx2",
        threads=2,
        n_prompt=4096,
        n_decode=64,
        runs={
            OURS: [Run(300, 30, 50 * MIB), Run(100, 10, 50 * MIB), Run(200, 20, 50 * MIB)],
            LLAMA_CPP: [Run(100, 40, 100 * MIB)],
        },
    )
    tables = format_tables([measurement])
    prefill, decode, memory = (cells_of(table.splitlines()[2]) for table in tables)
    assert prefill[:3] == ["llama-3.2-1b Q6_K", "4,096", "200 (100 to 300)"]
    assert decode[2] == "20.0 (10.0 to 30.0)"
    assert [prefill[4], decode[4], memory[4]] == ["2.00x", "0.50x", "0.50x"]

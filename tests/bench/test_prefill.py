"""The speed comparison: names, turns, medians and ratios, with runs that give recorded speeds."""

from __future__ import annotations

import argparse

import pytest

from bench.prefill import Measurement, alternate, format_table, parse_sizes
from edgeh2o.evaluation.throughput import Workload
from tests.bench.tables import cells_of


def make_measurement(samples: dict[str, list[float]]) -> Measurement:
    return Measurement(
        model="model-q4_0.gguf",
        backend="haswell",
        isa="avx2",
        threads=2,
        workload=Workload(n_prompt=4096),
        samples=samples,
    )


def test_contestants_take_turns() -> None:
    calls: list[str] = []

    def make_run(name: str) -> tuple[str, object]:
        return name, lambda workload: calls.append(name) or float(len(calls))

    samples = alternate(dict([make_run("a"), make_run("b")]), Workload(n_prompt=1), 3, "label")
    assert calls == ["a", "b"] * 3
    assert samples == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_ratios_compare_with_the_better_median_of_llama_cpp() -> None:
    measurement = make_measurement(
        {"sparse": [900, 1000, 5000], "fa off": [90, 100, 900], "fa on": [250, 190, 200]}
    )
    assert measurement.ratio("sparse") == pytest.approx(1000 / 200)
    assert measurement.ratio("dense") is None
    assert make_measurement({"sparse": [1.0]}).ratio("sparse") is None


def test_the_table_has_every_contestant_and_both_ratios() -> None:
    measurement = make_measurement(
        {"sparse": [1000.0], "dense": [300.0], "fa off": [100.0], "fa on": [200.0]}
    )
    row = format_table([measurement]).splitlines()[2]
    cells = cells_of(row)
    assert cells[:4] == ["model-q4_0.gguf", "avx2 (haswell)", "2", "pp4096"]
    assert cells[4] == "1,000 (1,000 to 1,000)"
    assert cells[-2:] == ["5.00x", "1.50x"]


def test_sizes() -> None:
    assert parse_sizes("512,4096") == (512, 4096)
    assert parse_sizes("") == ()
    with pytest.raises(argparse.ArgumentTypeError, match="512,4096"):
        parse_sizes("512;4096")

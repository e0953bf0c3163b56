"""The kernel benchmark: peaks that a kernel cannot exceed, and a report of every ISA and type."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from bench import kernels, memory_bound
from edgeh2o import _core, _kernels, isa
from edgeh2o.host.threads import default_thread_count


@pytest.mark.parametrize("kind", ["f32", "q4", "q8"])
@pytest.mark.parametrize("name", isa.available())
def test_the_operations_of_a_peak_grow_with_its_rounds(name: str, kind: str) -> None:
    one = _kernels.peak(name, kind, 1)
    assert one > 0
    assert _kernels.peak(name, kind, 7) == 7 * one


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("name", isa.available())
def test_two_bytes_have_a_peak_where_attention_has_them(name: str, kind: str) -> None:
    before = isa.active()
    isa.use(name)
    try:
        if kind in _core.attention_precisions():
            assert _kernels.peak(name, kind, 3) == 2 * _kernels.peak(name, "f32", 3)
        else:
            with pytest.raises(ValueError, match=f"{name} has no products of {kind}"):
                _kernels.peak(name, kind, 3)
    finally:
        isa.use(before)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of f32, bf16, f16, int8, int16, q4, q8"):
        _kernels.peak("scalar", "f64", 1)


def test_the_report_has_every_product_and_attention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two matrices of a small shape instead of those that only memory holds.
    monkeypatch.setattr(memory_bound, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(memory_bound, "SHAPE", (512, 1024))
    monkeypatch.setattr(memory_bound, "CHUNK_SIZE", 128)
    monkeypatch.setattr(memory_bound.Caches, "N_TOKENS", 300)
    memory = ["--memory-types", "Q4_0,Q4_1,F16"]
    arguments = ["--types", "Q4_0,Q6_K", "--rows", "8", "--tokens", "512", "-r", "1", "-o", "json"]
    monkeypatch.setattr(sys, "argv", ["bench.kernels", "--isa", isa.active(), *memory, *arguments])
    assert kernels.main() == 0
    report = json.loads(capsys.readouterr().out)["results"]
    assert {record["type"] for record in report["products"]} == {"Q4_0", "Q6_K"}
    assert len(report["attention"]) == 3 * len(_core.attention_precisions())
    for record in report["products"] + report["attention"]:
        assert record["operations_per_s"] > 0
    records = report["memory_bound"]
    n_threads = memory_bound.thread_counts(default_thread_count())
    assert [(r["type"], r["threads"]) for r in records] == [
        (name, n) for name in ("Q4_0", "Q4_1", "F16") for n in n_threads
    ]
    for record in records:
        assert record["share_of_bandwidth"] == pytest.approx(
            record["bytes_per_s"] / record["bandwidth"]
        )
        few_rows = [] if record["type"] == "Q4_1" else list(memory_bound.FEW_ROWS)
        assert list(map(int, record["times_of_one_row"])) == few_rows
        assert all(times > 0 for times in record["times_of_one_row"].values())
    decode = report["decode_attention"]
    assert len(decode) == len(n_threads) * 2 * len(memory_bound.CACHE_TYPES)
    for record in decode:
        assert record["bytes_per_s"] > 0 and record["share_of_bandwidth"] == pytest.approx(
            record["bytes_per_s"] / record["bandwidth"]
        )
    table = memory_bound.format_decode_attention(decode)
    assert table.count(" q8_0/f16 |") == 2 * len(n_threads)
    tables = memory_bound.format_memory_bound(records)
    assert tables.count(" Q4_1 |") == len(n_threads)
    assert tables.count(" F16 |") == 2 * len(n_threads)


@pytest.mark.parametrize("name", isa.available())
def test_reading_takes_time_in_every_round(name: str) -> None:
    seconds = _kernels.measure_read(name, 3 * 2**20 + 1, 4)
    assert seconds.shape == (4,) and np.all(seconds > 0)
    with pytest.raises(ValueError, match="nothing"):
        _kernels.measure_read("nothing", 2**20, 1)


def test_packed_weights_tell_their_bytes() -> None:
    data = np.zeros(64 * 18 * 8, np.uint8)
    weights = _kernels.Weights(isa.active(), "Q4_0", data, 64, 256)
    assert weights.n_bytes >= data.size


def test_threads_are_those_that_have_a_core() -> None:
    assert memory_bound.thread_counts(1) == [1]
    assert memory_bound.thread_counts(3) == [1, 2]
    assert memory_bound.thread_counts(64) == [1, 2, 4]

"""The kernel benchmark: peaks that a kernel cannot exceed, and a report of every ISA and type."""

from __future__ import annotations

import json
import sys

import pytest

from bench import kernels
from edgeh2o import _core, _kernels, isa


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
    with pytest.raises(ValueError, match="not one of f32, bf16, f16, q4, q8"):
        _kernels.peak("scalar", "f64", 1)


def test_the_report_has_every_product_and_attention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--types", "Q4_0,Q6_K", "--rows", "8", "--tokens", "512", "-r", "1", "-o", "json"]
    monkeypatch.setattr(sys, "argv", ["bench.kernels", "--isa", isa.active(), *arguments])
    assert kernels.main() == 0
    report = json.loads(capsys.readouterr().out)["results"]
    assert {record["type"] for record in report["products"]} == {"Q4_0", "Q6_K"}
    assert len(report["attention"]) == 3 * len(_core.attention_precisions())
    for record in report["products"] + report["attention"]:
        assert record["operations_per_s"] > 0

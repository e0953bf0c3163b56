"""Products with packed weights as other runtimes call them, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from edgeh2o import _core

pytestmark = pytest.mark.usefixtures("isa")

DEPTH = 96


@pytest.mark.parametrize("n_rows", [1, 2, 7, 40])
@pytest.mark.parametrize("types", [("Q4_0", "Q8_0"), ("Q4_1", "Q4_1"), ("Q8_0", "F32"), ("F32",)])
def test_products_of_one_input(types: tuple[str, ...], n_rows: int) -> None:
    """The bound is that of activations rounded to 8 bits per 32 values."""
    rng = np.random.default_rng(n_rows)
    x = rng.standard_normal((n_rows, DEPTH)).astype(np.float32)
    linears, outs, expected, bounds = [], [], [], []
    step = np.repeat(np.abs(x.reshape(n_rows, -1, 32)).max(-1) / 127, 32, 1)
    for i, name in enumerate(types):
        kind, n_outputs = GGMLQuantizationType[name], 5 + 65 * i
        values = rng.standard_normal((n_outputs, DEPTH)).astype(np.float32)
        data = values.view(np.uint8) if name == "F32" else quantize(values, kind)
        weight = values if name == "F32" else dequantize(data, kind)
        bias = rng.standard_normal(n_outputs).astype(np.float32) if i else None
        linears.append(_core.Linear(data.reshape(-1).data, name, n_outputs, DEPTH, bias))
        outs.append(np.full((n_rows, n_outputs), np.nan, np.float32))
        expected.append(x.astype(np.float64) @ weight.T + (0 if bias is None else bias))
        is_rounded = 0.0 if name == "F32" else 0.51
        bounds.append(is_rounded * step @ np.abs(weight).T + 1e-4)
    matmul = _core.Matmul(40, DEPTH)
    assert matmul.n_bytes >= 40 * DEPTH
    matmul.run(x, linears, outs)
    for out, wanted, bound in zip(outs, expected, bounds, strict=True):
        assert (np.abs(out - wanted) <= bound).all()


def test_what_does_not_fit_is_refused() -> None:
    linear = _core.Linear(bytes(18 * 2 * 4), "Q4_0", 4, 64)
    assert (linear.rows, linear.cols) == (4, 64)
    matmul = _core.Matmul(2, 64)
    x, out = np.zeros((2, 64), np.float32), np.empty((2, 4), np.float32)
    matmul.run(x, [linear], [out])
    np.testing.assert_array_equal(out, 0)
    cases: list[tuple[Any, Any, Any, str]] = [
        (np.zeros((3, 64), np.float32), [linear], [out], "1 to 2 rows"),
        (np.zeros((0, 64), np.float32), [linear], [out], "1 to 2 rows"),
        (np.zeros((2, 96), np.float32), [linear], [out], "at most 64"),
        (np.zeros((2, 32), np.float32), [linear], [out], "has 64 inputs"),
        (np.zeros(64, np.float32), [linear], [out], "dimensions"),
        (x, [linear], [np.empty((2, 5), np.float32)], "output 0 must be"),
        (x, [linear], [out[:1]], "output 0 must be"),
        (x, [linear, linear], [out], "2 weights for 1"),
        (x, [], [], "0 weights"),
    ]
    for rows, linears, outs, message in cases:
        with pytest.raises(ValueError, match=message):
            matmul.run(rows, linears, outs)
    with pytest.raises(ValueError, match="bytes"):
        _core.Linear(bytes(18), "Q4_0", 4, 64)
    with pytest.raises(ValueError, match="bias"):
        _core.Linear(bytes(18 * 2 * 4), "Q4_0", 4, 64, np.zeros(3, np.float32))
    with pytest.raises(TypeError):
        matmul.run(x.astype(np.float64), [linear], [out])  # type: ignore[arg-type]


def test_another_instruction_set_is_refused() -> None:
    """Weights and memory are laid out for the one that was active when they were made."""
    before = _core.active_isa()
    others = [name for name in _core.available_isas() if name != before]
    if not others:
        pytest.skip("this machine runs one instruction set")
    linear = _core.Linear(bytes(18), "Q4_0", 1, 32)
    _core.use_isa(others[0])
    matmul = _core.Matmul(1, 32)
    x, out = np.zeros((1, 32), np.float32), np.empty((1, 1), np.float32)
    with pytest.raises(ValueError, match=f"packed for {before}"):
        matmul.run(x, [linear], [out])

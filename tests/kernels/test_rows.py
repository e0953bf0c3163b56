"""Row-wise kernels of every ISA against NumPy in float64, for every kind of vector tail."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _kernels
from tests.joined_cases import for_each
from tests.kernels.inputs import EPS, LENGTHS, normal


@for_each("n", LENGTHS)
def test_rms_norm(isa: str, n: int) -> None:
    x, weight = normal(n, n) * 30, normal(n + 1, n)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt(np.mean(exact**2) + 1e-5) * weight
    np.testing.assert_allclose(_kernels.rms_norm(isa, x, weight, 1e-5), exact, rtol=8 * EPS)


@for_each("n", LENGTHS)
def test_rope_rotates_pairs(isa: str, n: int) -> None:
    x, angle = normal(n, 2 * n), normal(n + 1, n) * 10
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[:n].astype(np.float64), x[n:].astype(np.float64)
    exact = np.concatenate([a * cos - b * sin, a * sin + b * cos])
    size = np.tile(np.hypot(a, b), 2)
    assert np.all(np.abs(_kernels.rope(isa, x, cos, sin) - exact) <= 4 * EPS * size)


@for_each("n", LENGTHS)
def test_swiglu(isa: str, n: int) -> None:
    gate, up = normal(n, n) * 20, normal(n + 1, n)
    exact = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(_kernels.swiglu(isa, gate, up), exact, rtol=1e-6, atol=1e-30)


def test_swiglu_of_extreme_gates(isa: str) -> None:
    gate = np.array([-1e30, -200, -90, 0, 90, 200, 1e30], np.float32)
    result = _kernels.swiglu(isa, gate, np.ones_like(gate))
    np.testing.assert_allclose(result, np.where(gate > 0, gate, 0), atol=1e-30)


@for_each("n", LENGTHS)
def test_clamped_swiglu(isa: str, n: int) -> None:
    rng = np.random.default_rng(n)
    gate, up = (rng.uniform(-12, 12, n).astype(np.float32) for _ in range(2))
    g, u = (np.asarray(x, np.float64) for x in (np.minimum(gate, 7), np.clip(up, -7, 7)))
    exact = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    result = _kernels.swiglu_clamped(isa, gate, up)
    np.testing.assert_allclose(result, exact, rtol=2e-5, atol=2e-5)
    nans = np.full_like(gate, np.nan)
    assert np.isnan(_kernels.swiglu_clamped(isa, nans, np.ones_like(gate))).all()
    assert np.isnan(_kernels.swiglu_clamped(isa, np.ones_like(gate), nans)).all()
    assert np.isnan(_kernels.swiglu_clamped(isa, np.full_like(gate, -1e30), up)).sum() == 0


@for_each("n", LENGTHS)
def test_geglu(isa: str, n: int) -> None:
    gate, up = normal(n, n) * 3, normal(n + 1, n)
    g = gate.astype(np.float64)
    # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u)), which keeps its digits where tanh is almost -1.
    u = np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    exact = g / (1 + np.exp(-2 * u)) * up
    np.testing.assert_allclose(_kernels.geglu(isa, gate, up), exact, rtol=2e-5, atol=1e-30)
    extreme = np.array([-1e12, -200, -20, 0, 20, 200, 1e12], np.float32)
    result = _kernels.geglu(isa, extreme, np.ones_like(extreme))
    np.testing.assert_allclose(result, np.where(extreme > 0, extreme, 0), atol=1e-30)


@for_each("n", LENGTHS)
def test_soft_cap(isa: str, n: int) -> None:
    x = normal(n, n) * 60
    for cap in (0.5, 30.0, 50.0 * 1.4426950408889634):
        exact = cap * np.tanh(x.astype(np.float64) / cap)
        np.testing.assert_allclose(_kernels.soft_cap(isa, x, cap), exact, atol=4 * EPS * cap)
    extreme = np.array([-np.inf, -1e30, 0, 1e30, np.inf], np.float32)
    expected = np.array([-30, -30, 0, 30, 30], np.float32)
    np.testing.assert_array_equal(_kernels.soft_cap(isa, extreme, 30.0), expected)


def test_not_a_number_is_not_hidden(isa: str) -> None:
    gate = np.full(17, np.nan, np.float32)
    assert np.isnan(_kernels.swiglu(isa, gate, np.ones_like(gate))).all()
    assert np.isnan(_kernels.geglu(isa, gate, np.ones_like(gate))).all()
    assert np.isnan(_kernels.soft_cap(isa, gate, 30.0)).all()


@for_each("n", LENGTHS)
def test_add_and_scale(isa: str, n: int) -> None:
    x, y = normal(n, n), normal(n + 1, n)
    np.testing.assert_array_equal(_kernels.add(isa, x, y), x + y)
    np.testing.assert_array_equal(_kernels.scale(isa, x, 0.3), x * np.float32(0.3))


@for_each("n", LENGTHS)
def test_half_precision_round_trip(isa: str, n: int) -> None:
    x = normal(n, n) * np.float32(10.0) ** np.random.default_rng(n).integers(-8, 5, n)
    x = x.astype(np.float32)
    half = _kernels.to_f16(isa, x)
    np.testing.assert_array_equal(half, x.astype(np.float16))
    np.testing.assert_array_equal(_kernels.from_f16(isa, half), half.astype(np.float32))


def test_every_half_is_read_exactly(isa: str) -> None:
    half = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = half[np.isfinite(half)]
    np.testing.assert_array_equal(_kernels.from_f16(isa, finite), finite.astype(np.float32))
    special = half[~np.isfinite(half)]
    with np.errstate(invalid="ignore"):  # signalling NaNs, of which NumPy on aarch64 warns
        expected = special.astype(np.float32)
    np.testing.assert_array_equal(_kernels.from_f16(isa, special), expected)


def test_halves_at_rounding_borders(isa: str) -> None:
    half = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (half[:-1] + half[1:]) / 2
    x = np.concatenate([middle, -middle, np.nextafter(middle, 0), [65519.9, 65520, 1e9, np.inf]])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(_kernels.to_f16(isa, x), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("positions", [None, [], [4], [0, 3, 3, 8]], ids=str)
@for_each("n", LENGTHS)
def test_add_kv_rows(isa: str, n: int, dtype: type, positions: list[int] | None) -> None:
    x, rows = normal(n, n), normal(n + 1, 9, n).astype(dtype)
    indices = None if positions is None else np.array(positions, np.int32)
    chosen = rows if indices is None else rows[indices]
    result = _kernels.add_kv_rows(isa, x, rows, indices)
    # One row after another in every instruction set, so that the sum rounds in this order.
    expected = x.copy()
    for row in chosen:
        expected += row.astype(np.float32)
    np.testing.assert_array_equal(result, expected)
    exact = x + chosen.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(result, exact, rtol=0, atol=20 * EPS * (1 + np.abs(rows).max()))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@for_each("n", LENGTHS)
def test_add_kv_squares(isa: str, n: int, dtype: type) -> None:
    x, rows = normal(n, n), normal(n + 1, 9, n).astype(dtype)
    result = _kernels.add_kv_squares(isa, x, rows)
    exact = x + np.square(rows.astype(np.float64)).sum(axis=0)
    np.testing.assert_allclose(result, exact, rtol=0, atol=20 * EPS * (1 + np.square(rows).max()))

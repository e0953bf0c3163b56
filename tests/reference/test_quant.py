"""Self-checks of the 8-bit row quantiser."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference.quant import dequantise_q8_rows, quantise_q8_rows


def test_error_is_at_most_half_a_step() -> None:
    x = np.random.default_rng(0).standard_normal((7, 96)) * np.logspace(-3, 3, 7)[:, None]
    q, d = quantise_q8_rows(x)
    assert q.dtype == np.int8 and d.dtype == np.float32 and d.shape == (7, 3)
    step = np.repeat(d.astype(np.float64), 32, axis=1)
    assert np.all(np.abs(dequantise_q8_rows(q, d) - x) <= step * (0.5 + 1e-5))
    assert np.abs(q.reshape(7, 3, 32).astype(int)).max(axis=-1).min() == 127


def test_halves_go_to_even_and_the_range_is_symmetric() -> None:
    x = np.zeros((1, 32))
    x[0, :6] = [127.0, -127.0, 0.5, 1.5, 2.5, -0.5]
    q, d = quantise_q8_rows(x)
    assert d[0, 0] == 1.0
    assert q[0, :6].tolist() == [127, -127, 0, 2, 2, 0]


def test_zero_block_has_zero_scale() -> None:
    q, d = quantise_q8_rows(np.zeros((2, 64)))
    assert not q.any() and not d.any()


def test_ragged_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise_q8_rows(np.zeros((1, 40)))

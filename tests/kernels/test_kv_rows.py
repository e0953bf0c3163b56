"""Rows of the key-value cache: what every instruction set stores, and how far from the truth."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edgeh2o import _core, _kernels
from edgeh2o.config import CACHE_TYPES
from tests.joined_cases import for_each
from tests.reference.cached_rows import largest_error, stored

BLOCK_BYTES = 34
ROW_DTYPES = {"f16": np.float16, "f32": np.float32, "q8_0": np.uint8}


def make_row(head_dim: int, *, magnitude: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(head_dim)
    scales = magnitude * 10.0 ** rng.integers(-3, 3, (head_dim // 32, 1))
    return (rng.standard_normal((head_dim // 32, 32)) * scales).astype(np.float32).ravel()


def load_row(isa: str, cache_type: str, row: np.ndarray, head_dim: int) -> np.ndarray:
    """Values [head_dim] of the bytes of a row."""
    rows = row.view(ROW_DTYPES[cache_type])[None]
    return _kernels.add_kv_rows(isa, np.zeros(head_dim, np.float32), rows)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@for_each("magnitude", [1e-7, 1e-4, 1.0, 30.0])
@for_each("head_dim", [32, 64, 96, 128, 256])
def test_a_row_is_stored_within_the_bound_of_its_type(
    isa: str, cache_type: str, magnitude: float, head_dim: int
) -> None:
    x = make_row(head_dim, magnitude=magnitude)
    row = _kernels.store_kv_row(isa, cache_type, x)
    values = load_row(isa, cache_type, row, head_dim)
    np.testing.assert_array_equal(values, stored(x, cache_type))
    assert (np.abs(values - x.astype(np.float64)) <= largest_error(x, cache_type)).all()


def test_blocks_are_those_of_gguf_files(isa: str) -> None:
    x = make_row(256)
    row = _kernels.store_kv_row(isa, "q8_0", x)
    assert len(row) == 256 // 32 * BLOCK_BYTES
    expected = dequantize(row.reshape(-1, BLOCK_BYTES), GGMLQuantizationType.Q8_0).ravel()
    np.testing.assert_array_equal(load_row(isa, "q8_0", row, 256), expected)


def test_every_quant_and_every_scale_is_read_exactly(isa: str) -> None:
    scales = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    rng = np.random.default_rng(0)
    quants = rng.integers(-128, 128, (len(scales), 32)).astype(np.int8)
    row = np.concatenate([scales.view(np.uint8).reshape(-1, 2), quants.view(np.uint8)], axis=1)
    values = load_row(isa, "q8_0", row.ravel(), quants.size)
    expected = quants * scales.astype(np.float64)[:, None]
    np.testing.assert_array_equal(values.reshape(-1, 32), expected)


def test_zeros_and_what_no_scale_can_hold(isa: str) -> None:
    x = np.zeros((6, 32), np.float32)
    x[1] = 1e-7  # the scale rounds to 0
    x[2, 5], x[3, 31], x[4, 0] = np.nan, -np.inf, 8.4e6
    x[5, 7] = 127 * 65504
    row = _kernels.store_kv_row(isa, "q8_0", x.ravel())
    values = load_row(isa, "q8_0", row, x.size).reshape(x.shape)
    assert (values[:2] == 0.0).all()
    assert np.isnan(values[2:5]).all()
    np.testing.assert_array_equal(values[5], x[5])


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_every_instruction_set_stores_the_same_bytes(cache_type: str) -> None:
    x = make_row(256)
    rows = [_kernels.store_kv_row(isa, cache_type, x) for isa in _core.available_isas()]
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


def test_rows_are_summed_like_the_floats_that_they_stand_for(isa: str) -> None:
    x = make_row(96)
    blocks = [
        _kernels.store_kv_row(isa, "q8_0", make_row(96, magnitude=m)) for m in (0.1, 1.0, 2.0)
    ]
    values = np.stack([load_row(isa, "q8_0", row, 96) for row in blocks])
    positions = np.array([0, 2, 2], np.int32)
    np.testing.assert_array_equal(
        _kernels.add_kv_rows(isa, x, np.stack(blocks), positions),
        _kernels.add_kv_rows(isa, x, values, positions),
    )
    np.testing.assert_array_equal(
        _kernels.add_kv_squares(isa, x, np.stack(blocks)), _kernels.add_kv_squares(isa, x, values)
    )


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows are \(1, 33\) of uint8, x has 32 elements"):
        load_row("scalar", "q8_0", np.zeros(33, np.uint8), 32)

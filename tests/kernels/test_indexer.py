"""The kernel of the lightning indexer, of every ISA, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _kernels, _recurrent_kernels
from tests.kernels.inputs import normal
from tests.reference.cached_rows import stored
from tests.reference.indexer import index_scores


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(("n_heads", "dim"), [(1, 32), (4, 128), (7, 64), (64, 128)])
def test_index_scores(isa: str, cache_type: str, n_heads: int, dim: int) -> None:
    n_keys = 67
    q, weights, keys = normal(1, n_heads, dim), normal(2, n_heads), normal(3, n_keys, dim)
    rows = np.array([_kernels.store_kv_row(isa, cache_type, key) for key in keys])
    out = _recurrent_kernels.index_scores(isa, q, weights, cache_type, rows)
    exact = index_scores(q[None].astype(np.float64), weights[None], stored(keys, cache_type))[0]
    bound = np.abs(weights).sum() * np.abs(q).max() * np.abs(keys).max() * dim
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-7 * bound)
    assert (weights < 0).any() or n_heads == 1
    # A key's score does not depend on its neighbours, bit for bit.
    alone = _recurrent_kernels.index_scores(isa, q, weights, cache_type, rows[33:40])
    np.testing.assert_array_equal(alone, out[33:40])


def test_what_is_not_a_number_gives_none(isa: str) -> None:
    """Lest it be chosen, or hidden by the maximum with zero."""
    q, weights, keys = normal(1, 4, 32), normal(2, 4), normal(3, 40, 32)
    keys[7, 5], keys[9, 0] = np.nan, np.inf
    out = _recurrent_kernels.index_scores(isa, q, weights, "f32", keys.view(np.uint8))
    assert not np.isfinite(out[[7, 9]]).any()
    assert np.isfinite(np.delete(out, [7, 9])).all()

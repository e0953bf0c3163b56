"""The two forms of latent attention give the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference.decoder.latent import absorbed_queries, absorbed_values, expanded
from tests.reference.dense import causal_attention

N_HEADS, RANK, ROPE, NOPE, VALUE = 3, 12, 4, 6, 5


@pytest.mark.parametrize("n_queries", [1, 7, 20])
def test_rows_in_one_head_are_keys_and_values_of_all(n_queries: int) -> None:
    rng = np.random.default_rng(n_queries)
    rows = rng.standard_normal((20, RANK + ROPE))
    q = rng.standard_normal((N_HEADS, n_queries, NOPE + ROPE))
    w_k = rng.standard_normal((N_HEADS, NOPE, RANK))
    w_v = rng.standard_normal((N_HEADS, VALUE, RANK))
    expected = causal_attention(q, *expanded(rows, w_k, w_v), scale=0.1)
    attended = causal_attention(
        absorbed_queries(q, w_k), rows[None], rows[None, :, :RANK], scale=0.1
    )
    actual = absorbed_values(attended, w_v)
    assert actual.shape == (N_HEADS, n_queries, VALUE)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


def test_a_product_by_hand() -> None:
    """Logits 2 * 3 + 5 * 7 of the head's own, and 1 * 4 of the part that all heads share."""
    w_k = np.array([[[3.0], [7.0]]])
    q = np.array([[[2.0, 5.0, 1.0, 0.0]]])
    rows = np.array([[1.0, 4.0, 9.0]])
    absorbed = absorbed_queries(q, w_k)
    np.testing.assert_array_equal(absorbed, [[[41.0, 1.0, 0.0]]])
    keys, values = expanded(rows, w_k, np.array([[[2.0]]]))
    np.testing.assert_array_equal(keys, [[[3.0, 7.0, 4.0, 9.0]]])
    np.testing.assert_array_equal(values, [[[2.0]]])
    assert (absorbed[0] @ rows.T).item() == (q[0] @ keys[0].T).item() == 45.0

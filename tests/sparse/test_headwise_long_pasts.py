"""Heads that read their whole past, up to a limit and beyond it, and landmarks of long pasts."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Shape, make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.pairs import pairs_dense
from tests.reference.qkv import random_qkv
from tests.sparse.headwise_case import BUDGETS, CLOSE, SHAPE, S, make_headwise

pytestmark = pytest.mark.usefixtures("isa")


def test_whole_past_everywhere_is_the_dense_policy_exactly() -> None:
    n_tokens = 5 * S + 7
    qkv = random_qkv(1, n_tokens=n_tokens, **SHAPE.heads)
    attention, _ = make_headwise(n_tokens, (None, None, None))
    dense = make_attention(_core.dense_policy(), SHAPE, chunk_size=S, max_context=n_tokens)
    np.testing.assert_array_equal(prefill(attention, qkv), prefill(dense, qkv))
    assert attention.pairs_computed == pairs_dense(n_tokens)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("budgets", [(200, 10**6, None), (160, 160, 160)], ids=str)
def test_budgets_for_the_whole_past_equal_dense(
    budgets: tuple[int | None, ...], page_size: int
) -> None:
    n_tokens = 5 * S + 7
    qkv = random_qkv(2, n_tokens=n_tokens, **SHAPE.heads)
    attention, _ = make_headwise(n_tokens, budgets, page_size=page_size)
    np.testing.assert_allclose(prefill(attention, qkv), causal_attention(*qkv), **CLOSE)
    assert attention.pairs_computed == pairs_dense(n_tokens)


def test_a_past_up_to_the_limit_is_read_whole() -> None:
    n_tokens = 4 * S
    qkv = random_qkv(6, n_tokens=n_tokens, **SHAPE.heads)
    outputs = [
        prefill(make_headwise(n_tokens, (None,) * 3, max_past=limit)[0], qkv)
        for limit in (0, 3 * S, 3 * S - 1)
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0][:, : 3 * S], outputs[2][:, : 3 * S])
    assert not np.array_equal(outputs[0][:, 3 * S :], outputs[2][:, 3 * S :])


def test_landmarks_stay_fine_up_to_the_limit_and_few_beyond_it() -> None:
    limit, n_chunks, budget = 3 * S, 9, 12
    qkv = random_qkv(9, n_tokens=n_chunks * S, **SHAPE.heads)
    outputs, rows = [], []
    for max_past in (0, limit):
        attention, _ = make_headwise(n_chunks * S, (budget,) * 3, page_size=1, max_past=max_past)
        chunks = []
        for first in range(0, n_chunks * S, S):
            before = attention.pairs_computed
            chunks.append(prefill(attention, qkv, first=first, ends=(first + S,), is_last=False))
            rows.append((attention.pairs_computed - before - pairs_dense(S)) // S)
        outputs.append(np.concatenate(chunks, axis=1))
    np.testing.assert_array_equal(outputs[0][:, : limit + S], outputs[1][:, : limit + S])
    assert not np.array_equal(outputs[0][:, limit + S :], outputs[1][:, limit + S :])
    # Besides itself a chunk reads every earlier row one way or another; then as many as before.
    assert rows[:n_chunks] == [*range(0, n_chunks * S, S)]
    assert rows[n_chunks : n_chunks + 4] == [0, S, 2 * S, limit]
    assert all(limit <= n <= limit + budget for n in rows[n_chunks + 4 :])


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("group", [1, 5])
def test_recall_finds_the_page_that_one_query_asks_for(group: int, soft_cap: float) -> None:
    """A lone strong match deep in the past, in every query head in turn, is read by its chunk."""
    shape = Shape(n_kv_heads=1, group=group, head_dim=16)
    n_tokens, limit, largest_page = 16 * S, 192, 32
    q, k, v = (0.1 * array for array in random_qkv(7, n_tokens=n_tokens, **shape.heads))
    attention = make_attention(
        _core.headwise_policy([None], local=16, sinks=1, max_past=limit),
        shape,
        chunk_size=S,
        max_context=n_tokens,
        soft_cap=soft_cap,
    )
    rng = np.random.default_rng(8)
    for chunk in range(7, 16):
        target = int(rng.integers(16, chunk * S - 48))
        query = chunk * S + int(rng.integers(0, S))
        k[0, target] = 4 * np.eye(16)[chunk]
        q[chunk % group, query] = 8 * k[0, target]
        attention.reset()
        prefill(attention, (q, k, v), ends=((chunk + 1) * S,), is_last=False)
        positions = attention.policy.memory_set(0, 0)
        assert len(positions) <= limit + largest_page
        assert target in positions


def test_whole_past_heads_keep_no_scores() -> None:
    attention, _ = make_headwise(S)
    with pytest.raises(ValueError, match="keeps no scores"):
        attention.policy.scores(0, BUDGETS.index(None))

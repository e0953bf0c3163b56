"""The policy interface in a prefill, driven from Python: budgets per head, synthetic rows, sums."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Shape, make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.h2o import H2OLayer
from tests.reference.qkv import random_qkv
from tests.reference.softmax_state import Array
from tests.sparse.budget_rule import FULL, BudgetRule, Selection
from tests.sparse.python_rules import CLOSE, N_TOKENS, SHAPE, S, make_policy

# A head smaller than the local window, two that are larger than a chunk, and a dense one.
BUDGETS = (7, 40, 100, FULL)

pytestmark = pytest.mark.usefixtures("isa")


def attend_jointly(
    qkv: tuple[Array, Array, Array], kv_head: int, selection: Selection
) -> tuple[Array, Array]:
    """Output [group, n, d] and joint weights [group, n, n_keys], float64.

    The keys are the memory positions, the chunk, and the synthetic rows, in this order.
    """
    q, k, v = qkv
    begin, end = selection.chunk
    own = np.arange(begin, end)
    positions = np.concatenate([selection.positions, own])
    keys = np.concatenate([k[kv_head, positions], selection.keys])
    values = np.concatenate([v[kv_head, positions], selection.values])
    queries = q[kv_head * SHAPE.group : (kv_head + 1) * SHAPE.group, begin:end]
    logits = queries @ keys.T * SHAPE.head_dim**-0.5
    logits[:, :, len(positions) :] += selection.biases
    logits[:, :, : len(positions)][:, positions[None, :] > own[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ values, weights


@pytest.mark.parametrize("column_sums", ["joint", "part", "none"])
@pytest.mark.parametrize("with_pages", [True, False], ids=["pages", "no-pages"])
def test_budgets_synthetic_rows_and_column_sums(column_sums: str, with_pages: bool) -> None:
    qkv = random_qkv(1, n_tokens=N_TOKENS, **SHAPE.heads)
    rule = BudgetRule(BUDGETS, local=8, max_context=N_TOKENS, with_pages=with_pages)
    policy = make_policy(rule, column_sums=column_sums)
    attention = make_attention(policy, SHAPE, chunk_size=S, max_context=N_TOKENS)
    output = prefill(attention, qkv, is_last=False)
    n_pairs = 0
    for head, budget in enumerate(BUDGETS):
        assert len(rule.selections[head]) == 9
        for selection in rule.selections[head]:
            begin, end = selection.chunk
            n_memory = len(selection.positions)
            assert n_memory == min(budget, begin)
            expected, weights = attend_jointly(qkv, head, selection)
            group = slice(head * SHAPE.group, (head + 1) * SHAPE.group)
            np.testing.assert_allclose(output[group, begin:end], expected, **CLOSE)
            n_pairs += (end - begin) * (n_memory + len(selection.biases))
            if budget == FULL or column_sums == "none":
                assert selection.memory_sums is None and selection.intra_sums is None
                continue
            memory, intra = weights[..., :n_memory], weights[..., n_memory:][..., : end - begin]
            if column_sums == "part":
                memory = memory / memory.sum(axis=-1, keepdims=True)
                intra = intra / intra.sum(axis=-1, keepdims=True)
            sums = {"rtol": 1e-5, "atol": 1e-5}
            np.testing.assert_allclose(selection.memory_sums, memory.sum(axis=(0, 1)), **sums)
            np.testing.assert_allclose(selection.intra_sums, intra.sum(axis=(0, 1)), **sums)
    n_intra = sum(n * (n + 1) // 2 for n in [S] * 9 + [13])
    assert attention.pairs_computed == n_intra + n_pairs // len(BUDGETS)


@pytest.mark.parametrize("ends", [(3 * S,), (S, 4 * S, 5 * S)], ids=str)
@pytest.mark.parametrize("column_sums", ["joint", "part"])
def test_several_calls_equal_one_exactly(column_sums: str, ends: tuple[int, ...]) -> None:
    qkv = random_qkv(2, n_tokens=N_TOKENS, **SHAPE.heads)
    outputs = []
    for calls in ((N_TOKENS,), (*ends, N_TOKENS)):
        rule = BudgetRule(BUDGETS, local=8, max_context=N_TOKENS)
        policy = make_policy(rule, column_sums=column_sums)
        attention = make_attention(policy, SHAPE, chunk_size=S, max_context=N_TOKENS)
        outputs.append(prefill(attention, qkv, ends=calls))
    np.testing.assert_array_equal(outputs[1], outputs[0])


@pytest.mark.usefixtures("keep_threads")
def test_threads_do_not_change_a_bit() -> None:
    qkv = random_qkv(3, n_tokens=N_TOKENS, **SHAPE.heads)
    outputs = []
    for n_threads in (1, 2, 3):
        _core.set_num_threads(n_threads)
        rule = BudgetRule(BUDGETS, local=8, max_context=N_TOKENS)
        attention = make_attention(make_policy(rule), SHAPE, chunk_size=S, max_context=N_TOKENS)
        outputs.append(prefill(attention, qkv))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])


def test_full_heads_beyond_one_piece_are_dense() -> None:
    shape = Shape(n_kv_heads=1, group=1, head_dim=8)
    qkv = random_qkv(4, n_tokens=2600, **shape.heads)
    rule = BudgetRule((FULL,), local=0, max_context=2600, with_pages=False)
    attention = make_attention(make_policy(rule), shape, chunk_size=512, max_context=2600)
    np.testing.assert_allclose(prefill(attention, qkv), causal_attention(*qkv), **CLOSE)


class H2OInPython:
    """The rule of H2OPolicy, to be compared with it."""

    def __init__(self, local: int, heavy: int, max_context: int, n_kv_heads: int) -> None:
        self.local, self.heavy = local, heavy
        self.scores = np.zeros((n_kv_heads, max_context), dtype=np.float32)
        self.previous = [(np.zeros(0, dtype=np.int64), 0)] * n_kv_heads

    def select_memory(self, layer, kv_head, chunk, queries, past_keys, past_values):  # type: ignore[no-untyped-def]
        from tests.reference.heavy_hitters import select_memory

        memory, begin = self.previous[kv_head]
        scores = self.scores[kv_head].astype(np.float64)
        positions, _ = select_memory(
            scores, memory, (begin, chunk[0]), local=self.local, heavy=self.heavy
        )
        self.previous[kv_head] = (positions, chunk[0])
        return positions

    def observe_intra(self, layer, kv_head, chunk, sums):  # type: ignore[no-untyped-def]
        self.scores[kv_head, chunk[0] : chunk[1]] += sums

    def observe_memory(self, layer, kv_head, chunk, positions, sums):  # type: ignore[no-untyped-def]
        self.scores[kv_head, positions] += sums


def test_h2o_in_python_equals_h2o_exactly() -> None:
    qkv = random_qkv(5, n_tokens=N_TOKENS, **SHAPE.heads)
    twins = (
        _core.h2o_policy(6, 10),
        make_policy(H2OInPython(6, 10, N_TOKENS, SHAPE.n_kv_heads), column_sums="part"),
    )
    outputs = [
        prefill(make_attention(policy, SHAPE, chunk_size=S, max_context=N_TOKENS), qkv)
        for policy in twins
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    layer = H2OLayer(chunk_size=S, local=6, heavy=10)
    layer.prefill(*qkv)
    for head in range(SHAPE.n_kv_heads):
        np.testing.assert_array_equal(twins[0].memory_set(0, head), twins[1].memory_set(0, head))

"""What every policy guarantees, checked for each row of the table in policies.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.attention_case import Shape, decode, make_attention, prefill
from tests.reference.qkv import random_qkv
from tests.sparse.policies import DENSE, POLICIES, PolicyCase

S = 32
SHAPE = Shape(head_dim=8)

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_memory_sets_keep_their_contract(case: PolicyCase) -> None:
    qkv = random_qkv(1, n_tokens=7 * S, **SHAPE.heads)
    attention = make_attention(case.make_policy(), SHAPE, chunk_size=S, max_context=7 * S)
    for begin in range(0, 7 * S, S):
        attention.reset()
        prefill(attention, qkv, ends=(begin + S,), is_last=False)
        for head in range(SHAPE.n_kv_heads):
            positions = attention.policy.memory_set(0, head)
            assert positions.dtype == np.int32
            budget = case.budgets[head]
            if begin <= case.max_past:
                assert len(positions) == (begin if budget is None else min(budget, begin))
            assert len(positions) <= case.max_past + 32  # whole pages
            assert np.all(np.diff(positions) > 0)
            assert np.all((positions >= 0) & (positions < begin))


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_a_new_prompt_starts_from_nothing(case: PolicyCase) -> None:
    attention = make_attention(case.make_policy(), SHAPE, chunk_size=S, max_context=3 * S)
    first = random_qkv(2, n_tokens=3 * S, **SHAPE.heads)
    expected = prefill(attention, first, is_last=False)
    sets = [attention.policy.memory_set(0, head) for head in range(SHAPE.n_kv_heads)]
    attention.reset()
    assert all(len(attention.policy.memory_set(0, head)) == 0 for head in range(SHAPE.n_kv_heads))
    prefill(attention, random_qkv(3, n_tokens=3 * S, **SHAPE.heads), is_last=False)
    attention.reset()
    np.testing.assert_array_equal(prefill(attention, first, is_last=False), expected)
    for head, positions in enumerate(sets):
        np.testing.assert_array_equal(attention.policy.memory_set(0, head), positions)


@pytest.mark.parametrize("case", [case for case in POLICIES if case.decodes_all], ids=str)
def test_decode_reads_everything_and_leaves_the_memory_alone(case: PolicyCase) -> None:
    qkv = random_qkv(4, n_tokens=5 * S, **SHAPE.heads)
    sizes = {"chunk_size": S, "max_context": 5 * S}
    attention, dense, read_only = (
        make_attention(policy, SHAPE, **sizes)
        for policy in (case.make_policy(), DENSE.make_policy(), case.make_policy())
    )
    for each in (attention, dense, read_only):
        prefill(each, qkv, ends=(3 * S,), stays_open=True)
    before = [attention.policy.memory_set(0, head) for head in range(SHAPE.n_kv_heads)]
    for position in range(3 * S, 3 * S + 4):
        np.testing.assert_array_equal(
            decode(attention, qkv, position), decode(dense, qkv, position)
        )
    for head, positions in enumerate(before):
        np.testing.assert_array_equal(attention.policy.memory_set(0, head), positions)
    # What comes after tokens that were taken back is what would have come without them.
    attention.rewind(3 * S)
    np.testing.assert_array_equal(
        prefill(attention, qkv, first=3 * S, ends=(5 * S,)),
        prefill(read_only, qkv, first=3 * S, ends=(5 * S,)),
    )


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_layers_are_independent(case: PolicyCase) -> None:
    """Two layers that take turns, chunk by chunk, equal two objects of one layer."""
    from edgeh2o import _core

    prompts = [random_qkv(seed, n_tokens=3 * S, **SHAPE.heads) for seed in (5, 6)]
    both = _core.ChunkedAttention(
        case.make_policy(n_layers=2),
        SHAPE.n_heads,
        SHAPE.n_kv_heads,
        SHAPE.head_dim,
        n_layers=2,
        chunk_size=S,
        batch_size=S,
        max_context=3 * S,
    )
    alone = [
        make_attention(case.make_policy(), SHAPE, chunk_size=S, max_context=3 * S, cache_type="f16")
        for _ in prompts
    ]
    for begin in range(0, 3 * S, S):
        for layer, qkv in enumerate(prompts):
            rows = [
                np.ascontiguousarray(array[:, begin : begin + S].swapaxes(0, 1)) for array in qkv
            ]
            np.testing.assert_array_equal(
                both.run(layer, *rows, is_last=False), alone[layer].run(0, *rows, is_last=False)
            )
    for layer, attention in enumerate(alone):
        for head in range(SHAPE.n_kv_heads):
            np.testing.assert_array_equal(
                both.policy.memory_set(layer, head), attention.policy.memory_set(0, head)
            )

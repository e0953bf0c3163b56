"""Budgets per KV head: scores, positions and landmarks against the oracle, chunk by chunk."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from edgeh2o import _core
from tests.ops.attention_case import Qkv, decode, make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.headwise import HeadwiseLayer
from tests.reference.pairs import pairs_dense
from tests.reference.qkv import random_qkv
from tests.sparse.headwise_case import (
    BUDGETS,
    CLOSE,
    MIN_MARGIN,
    OPTIONS,
    SHAPE,
    S,
    check_latest_chunk,
    make_headwise,
    separated,
)

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("cache_type", ["f16", "f32"])
@pytest.mark.parametrize(
    ("budgets", "options"),
    [
        (BUDGETS, {}),
        (BUDGETS, {"page_size": 0}),
        ((1, 2, 3), {"page_size": 5}),
        ((8, 33, 100), {"decay": 1.0, "page_size": 64}),
        ((16, None, 30), {"decay": 0.0, "sinks": 0, "local": 0}),
        ((16, 12, 30), {"sinks": 100, "local": 100, "page_size": 1}),
        ((9, None, None), {"max_past": 60, "page_size": 32}),
        ((None, None, None), {"max_past": 96, "sinks": 0, "local": 40}),
        ((None, None, 24), {"max_past": 33, "page_size": 0}),
        ((9, 60, None), {"max_past": 64, "page_size": 1}),
        ((9, 20, None), {"max_past": 80, "page_size": 2}),
        ((None, 12, 30), {"max_past": 20, "page_size": 3}),
    ],
    ids=str,
)
def test_scores_positions_and_output_equal_the_oracle(
    budgets: tuple[int | None, ...], options: dict[str, Any], cache_type: str
) -> None:
    ends = [*range(S, 5 * S + 1, S), 5 * S + 7]
    qkv = separated(ends[-1], budgets, **options)
    attention, layer = make_headwise(ends[-1], budgets, cache_type=cache_type, **options)
    for start, end in pairwise((0, *ends)):
        attention.reset()
        output = prefill(attention, qkv, ends=(end,), is_last=False)
        expected = layer.prefill(*(array[:, start:end] for array in qkv))
        np.testing.assert_allclose(output[:, start:], expected, **CLOSE)
        check_latest_chunk(attention.policy, layer)


# The fixtures choose the instruction set only, which no example changes.
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 10**6),
    chunk_size=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    budgets=st.tuples(*[st.none() | st.integers(1, 120)] * 3),
    local=st.integers(0, 40),
    sinks=st.integers(0, 9),
    decay=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    page_size=st.integers(0, 50),
    max_past=st.integers(0, 200),
)
def test_any_sizes_equal_the_oracle(
    seed: int,
    chunk_size: int,
    lengths: list[int],
    budgets: tuple[int | None, ...],
    **options: Any,
) -> None:
    """Calls of any lengths: chunks and pages need not divide one another or the calls."""
    n_tokens = sum(lengths)
    qkv = random_qkv(seed, n_tokens=n_tokens, **SHAPE.heads)
    attention, layer = make_headwise(n_tokens, budgets, chunk_size=chunk_size, **options)
    ends = tuple(int(end) for end in np.cumsum(lengths))
    expected = np.concatenate(
        [
            layer.prefill(*(array[:, start:end] for array in qkv))
            for start, end in pairwise((0, *ends))
        ],
        axis=1,
    )
    assume(min(chunk.margins.min() for chunk in layer.chunks) > 1e-6)
    output = prefill(attention, qkv, ends=ends, is_last=False)
    np.testing.assert_allclose(output, expected, **CLOSE)
    check_latest_chunk(attention.policy, layer)
    for head in range(SHAPE.n_kv_heads):
        positions = attention.policy.memory_set(0, head)
        assert np.all(np.diff(positions) > 0)
        assert np.all((positions >= 0) & (positions < layer.chunks[-1].start))


@pytest.mark.parametrize("cache_type", ["f16", "f32"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 32])
def test_pages_of_equal_keys_equal_dense(page_size: int, cache_type: str) -> None:
    """n equal keys and their landmark are the same, whatever the values and the budgets."""
    q, k, v = (
        array.astype(np.float16).astype(np.float64)
        for array in random_qkv(3, n_tokens=5 * S, **SHAPE.heads)
    )
    k = np.repeat(k[:, ::page_size], page_size, axis=1)
    attention, _ = make_headwise(5 * S, (1, 30, None), page_size=page_size, cache_type=cache_type)
    output = prefill(attention, (q, k, v))
    np.testing.assert_allclose(output, causal_attention(q, k, v), **CLOSE)


def test_soft_caps_come_before_the_mass_of_a_landmark() -> None:
    qkv = random_qkv(5, n_tokens=3 * S, peak=6.0, **SHAPE.heads)
    options = {**OPTIONS, "sinks": 0, "local": 20}
    attention = make_attention(
        _core.headwise_policy([40] * 3, **options),
        SHAPE,
        chunk_size=S,
        max_context=3 * S,
        soft_cap=2.0,
    )
    layer = HeadwiseLayer(chunk_size=S, budgets=(40,) * 3, soft_cap=2.0, **options)
    np.testing.assert_allclose(prefill(attention, qkv), layer.prefill(*qkv), **CLOSE)
    assert all(len(marks.counts) > 0 for marks in layer.chunks[-1].landmarks)


@pytest.mark.parametrize("tail", [1, 7, S, 2 * S + 9, 10 * S])
@pytest.mark.parametrize("calls", [1, 3])
def test_a_dense_tail_equals_the_oracle(tail: int, calls: int) -> None:
    """The last queries of the last call read everything, as heads with the whole past do."""
    n_tokens = 5 * S + 7
    ends = (n_tokens,) if calls == 1 else (2 * S, 4 * S, n_tokens)
    qkv = separated(n_tokens, tail=tail)
    attention, layer = make_headwise(n_tokens, tail=tail)
    expected = [
        layer.prefill(*(array[:, start:end] for array in qkv), is_last=end == n_tokens)
        for start, end in pairwise((0, *ends))
    ]
    output = prefill(attention, qkv, ends=ends)
    np.testing.assert_allclose(output, np.concatenate(expected, axis=1), **CLOSE)
    n_tail = min(tail, n_tokens - (0 if calls == 1 else ends[-2]))
    dense = causal_attention(qkv[0][:, -n_tail:], *qkv[1:])
    np.testing.assert_allclose(output[:, -n_tail:], dense, **CLOSE)


def test_pairs_count_memory_and_landmarks() -> None:
    n_tokens = 5 * S + 7
    qkv = separated(n_tokens)
    attention, layer = make_headwise(n_tokens)
    prefill(attention, qkv)
    layer.prefill(*qkv)
    n_pairs = 0
    for chunk in layer.chunks:
        n = chunk.stop - chunk.start
        for positions, marks in zip(chunk.memory, chunk.landmarks, strict=True):
            n_pairs += pairs_dense(n) + n * (len(positions) + len(marks.counts))
    assert attention.pairs_computed == n_pairs // SHAPE.n_kv_heads


@pytest.mark.parametrize("n_decoded", [0, 1, 37])
def test_prompts_go_on_after_their_end(n_decoded: int) -> None:
    """Chat turns: a prompt, an answer, and so on; the last chunk of a prompt adds no scores."""
    lengths = [3 * S + 5, 2 * S, 11, S + 1]
    n_tokens = sum(lengths) + n_decoded * len(lengths)

    def run_oracle(qkv: Qkv, layer: HeadwiseLayer) -> list[np.ndarray]:
        outputs, position = [], 0
        for length in lengths:
            rows = [array[:, position : position + length] for array in qkv]
            outputs.append(layer.prefill(*rows, is_last=True))
            position += length
            for _ in range(n_decoded):
                row = [array[:, position : position + 1] for array in qkv]
                outputs.append(layer.decode(*row))
                position += 1
        return outputs

    for seed in range(50):
        qkv = random_qkv(seed, n_tokens=n_tokens, **SHAPE.heads)
        attention, layer = make_headwise(n_tokens)
        expected = run_oracle(qkv, layer)
        # Positions without scores tie at 0 in both.
        if all(np.all((c.margins > MIN_MARGIN) | (c.margins == 0.0)) for c in layer.chunks):
            break
    else:
        raise AssertionError("no seed decides every choice clearly")
    outputs, position = [], 0
    for length in lengths:
        rows = [
            np.ascontiguousarray(array[:, position : position + length].swapaxes(0, 1))
            for array in qkv
        ]
        outputs.append(attention.run(0, *rows, is_last=True).swapaxes(0, 1))
        position += length
        for _ in range(n_decoded):
            outputs.append(decode(attention, qkv, position))
            position += 1
    for output, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, wanted, **CLOSE)
    check_latest_chunk(attention.policy, layer)


def test_a_broken_query_leaves_sets_and_other_rows_sound() -> None:
    q, k, v = random_qkv(4, n_tokens=4 * S, **SHAPE.heads)
    q[0, 10] = np.nan
    attention, _ = make_headwise(4 * S)
    output = prefill(attention, (q, k, v), is_last=False)
    assert np.isnan(output[0, 10]).all()
    output[0, 10] = 0.0
    assert np.isfinite(output).all()
    positions = attention.policy.memory_set(0, 0)
    assert len(positions) == 9 and np.all(np.diff(positions) > 0)


@pytest.mark.parametrize(
    ("budgets", "options", "message"),
    [
        ([], {}, "headwise needs a budget for every layer and head, got none"),
        ([4, 0], {}, "a budget is 0; it must be at least 1"),
        ([4], {"decay": 1.5}, r"decay = 1.5 is not in \[0, 1\]"),
        ([4], {"decay": -0.5}, r"decay = -0.5 is not in \[0, 1\]"),
        ([4], {"decay": float("nan")}, "decay = .*nan is not in"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(
    budgets: list[int | None], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _core.headwise_policy(budgets, **options)


@pytest.mark.parametrize("n_budgets", [1, 2, 4, 6])
def test_budgets_must_fit_the_model(n_budgets: int) -> None:
    policy = _core.headwise_policy([4] * n_budgets)
    with pytest.raises(
        ValueError, match=f"{n_budgets} budgets do not fit 1 layers with 3 KV heads"
    ):
        make_attention(policy, SHAPE, chunk_size=S, max_context=S)


def test_budgets_change_after_what_was_read_whole() -> None:
    """What a prompt teaches gives its rest the budgets; a saved state is that of the new ones."""
    n_tokens, n_first = 256, 96
    room = (n_first,) * SHAPE.n_kv_heads
    attention, layer = make_headwise(n_tokens, room)
    qkv = separated(n_tokens)
    first = prefill(attention, qkv, ends=(n_first,), is_last=False)
    expected = layer.prefill(*(array[:, :n_first] for array in qkv), is_last=False)
    np.testing.assert_allclose(first, expected, **CLOSE)
    np.testing.assert_allclose(first, causal_attention(*qkv)[:, :n_first], **CLOSE)
    attention.policy.set_budgets(list(BUDGETS))
    layer.budgets = BUDGETS
    assert attention.mark()
    rest = prefill(attention, qkv, ends=(n_tokens,), first=n_first)
    expected = layer.prefill(*(array[:, n_first:] for array in qkv), is_last=True)
    np.testing.assert_allclose(rest, expected, **CLOSE)
    check_latest_chunk(attention.policy, layer)
    attention.rewind(n_first)
    np.testing.assert_array_equal(prefill(attention, qkv, ends=(n_tokens,), first=n_first), rest)
    state = attention.save_state()
    other, _ = make_headwise(n_tokens, BUDGETS)
    other.load_state(state)
    for head in range(SHAPE.n_kv_heads):
        np.testing.assert_array_equal(
            other.policy.memory_set(0, head) if BUDGETS[head] else [],
            attention.policy.memory_set(0, head) if BUDGETS[head] else [],
        )


def test_budgets_that_there_is_no_room_for() -> None:
    policy = _core.headwise_policy([8, 16, None], max_past=60)
    with pytest.raises(ValueError, match="serves no session yet"):
        policy.set_budgets([8, 16, None])
    attention = make_attention(policy, SHAPE, chunk_size=S, max_context=256)
    for budgets, message in (
        ([8, 16], "2 budgets for 3 heads"),
        ([8, 17, None], "17 is more than the 16 that there is room for"),
        ([0, 16, None], "a budget is 0"),
        ([None, 16, None], "of which only 60 are read"),
        ([8, 16, 1], "1 is more than the 0 that there is room for"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.set_budgets(budgets)
    attention.policy.set_budgets([4, 16, None])
    with pytest.raises(ValueError, match="has no budgets"):
        make_attention(
            _core.dense_policy(), SHAPE, chunk_size=S, max_context=64
        ).policy.set_budgets([1])

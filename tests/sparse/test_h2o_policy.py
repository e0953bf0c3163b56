"""Heavy hitters: scores and positions against the oracle, chunk by chunk."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Shape, decode, head_major, make_attention, prefill
from tests.reference.dense import causal_attention
from tests.reference.h2o import H2OLayer
from tests.reference.heavy_hitters import select_memory
from tests.reference.pairs import pairs_chunked, pairs_dense
from tests.reference.qkv import random_qkv, separated_qkv
from tests.reference.softmax_state import attend

S = 32
SHAPE = Shape(head_dim=8)
# Column sums of a chunk are at most 100; float32 sums of 300 terms keep six digits.
CLOSE = {"rtol": 2e-6, "atol": 2e-5}

pytestmark = pytest.mark.usefixtures("isa")


def separated(
    n_tokens: int, local: int, heavy: int, *, min_margin: float = 2e-4, **options: Any
) -> tuple[np.ndarray, ...]:
    return separated_qkv(
        0,
        lambda: H2OLayer(chunk_size=S, local=local, heavy=heavy, **options),
        n_tokens=n_tokens,
        min_margin=min_margin,
        **SHAPE.heads,
    )


def check_chunk_by_chunk(
    qkv: tuple[np.ndarray, ...], local: int, heavy: int, *, cache_type: str, **options: Any
) -> None:
    n_tokens = qkv[0].shape[1]
    layer = H2OLayer(chunk_size=S, local=local, heavy=heavy, **options)
    layer.prefill(*qkv)
    attention = make_attention(
        _core.h2o_policy(local, heavy, **options),
        SHAPE,
        chunk_size=S,
        max_context=n_tokens,
        cache_type=cache_type,
    )
    for chunk in layer.chunks:
        attention.reset()
        prefill(attention, qkv, ends=(chunk.stop,), is_last=False)
        for head in range(SHAPE.n_kv_heads):
            positions = attention.policy.memory_set(0, head)
            np.testing.assert_array_equal(positions, chunk.memory[head])
            scores = attention.policy.scores(0, head, chunk.stop)
            np.testing.assert_allclose(scores, chunk.ranks[head], **CLOSE)


@pytest.mark.parametrize(("local", "heavy"), [(4, 6), (0, 8), (8, 0), (20, 40)])
@pytest.mark.parametrize("cache_type", ["f16", "f32"])
def test_scores_and_positions_equal_the_oracle(local: int, heavy: int, cache_type: str) -> None:
    qkv = separated(6 * S + 5, local, heavy)
    check_chunk_by_chunk(qkv, local, heavy, cache_type=cache_type)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": 3},
        {"decay": 0.5},
        {"score": "mean"},
        {"score": "mean", "decay": 0.9, "sinks": 4, "by_values": True},
        {"score": "lift"},
        {"score": "lift", "decay": 0.9},
        {"score": "window", "window": 1},
        {"score": "window", "window": 9, "by_values": True},
        {"score": "window", "window": 1000},
        {"by_values": True},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("cache_type", ["f16", "f32"])
def test_options_equal_the_oracle(options: dict[str, Any], cache_type: str) -> None:
    # Means are smaller than sums, and so are the gaps between them.
    qkv = separated(6 * S + 5, 4, 9, min_margin=5e-5, **options)
    check_chunk_by_chunk(qkv, 4, 9, cache_type=cache_type, **options)


def test_lift_of_uniform_attention_is_one() -> None:
    """With q = 0 a column sum is the number of queries that saw the key, times the group."""
    _, k, v = random_qkv(6, n_tokens=2 * S, **SHAPE.heads)
    attention = make_attention(
        _core.h2o_policy(2 * S, 1, score="lift"), SHAPE, chunk_size=S, max_context=2 * S
    )
    prefill(attention, (np.zeros((SHAPE.n_heads, 2 * S, 8)), k, v), is_last=False)
    ages = np.concatenate([np.arange(S, 0, -1) + S, np.arange(S, 0, -1)])
    for head in range(SHAPE.n_kv_heads):
        lift = SHAPE.group * ages / np.maximum(ages, 32)  # 1 per query head once it has an age
        np.testing.assert_allclose(attention.policy.scores(0, head), lift, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local": 0, "heavy": 0, "sinks": 4}, "h2o needs local . heavy >= 1"),
        ({"score": "max"}, "score = 'max'; it is one of sum, mean, lift, window"),
        ({"score": "window", "window": 0}, "window must be at least 1"),
        ({"decay": 1.5}, r"decay = 1.5 is not in \[0, 1\]"),
        ({"decay": -0.1}, r"decay = -0.1 is not in \[0, 1\]"),
        ({"decay": float("nan")}, "decay = .*nan is not in"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.h2o_policy(**{"local": 4, "heavy": 4, **options})


def test_ties_go_to_the_lower_position() -> None:
    """All logits equal; every sum of weights is exact in binary, as in the oracle's own test."""
    shape = Shape(n_kv_heads=1, group=1, head_dim=8)
    zeros = np.zeros((1, 6, 8))
    attention = make_attention(_core.h2o_policy(1, 2), shape, chunk_size=2, max_context=6)
    prefill(attention, (zeros, zeros, zeros), is_last=False)
    assert attention.policy.memory_set(0, 0).tolist() == [0, 1, 3]


def test_scores_only_grow_and_sum_to_the_queries() -> None:
    n_tokens = 5 * S
    qkv = random_qkv(2, n_tokens=n_tokens, **SHAPE.heads)
    attention = make_attention(_core.h2o_policy(6, 6), SHAPE, chunk_size=S, max_context=n_tokens)
    before = np.zeros((SHAPE.n_kv_heads, n_tokens))
    for begin in range(0, n_tokens, S):
        attention.reset()
        prefill(attention, qkv, ends=(begin + S,), is_last=False)
        scores = np.stack([attention.policy.scores(0, head) for head in range(SHAPE.n_kv_heads)])
        assert np.all(scores >= before) and np.isfinite(scores).all()
        n_rows = S * SHAPE.group * (1 if begin == 0 else 2)  # a chunk's own part, and its memory
        np.testing.assert_allclose((scores - before).sum(axis=1), n_rows, rtol=1e-5)
        before = scores


def test_kv_heads_choose_for_themselves() -> None:
    qkv = separated(4 * S, 4, 6)
    attention = make_attention(_core.h2o_policy(4, 6), SHAPE, chunk_size=S, max_context=4 * S)
    prefill(attention, qkv, is_last=False)
    first, second = (attention.policy.memory_set(0, head) for head in range(2))
    assert not np.array_equal(first, second)


def test_the_last_chunk_is_not_scored() -> None:
    """Nothing reads its scores, so the prompt's last call skips them."""
    qkv = random_qkv(3, n_tokens=3 * S, **SHAPE.heads)
    attention = make_attention(_core.h2o_policy(4, 6), SHAPE, chunk_size=S, max_context=3 * S)
    prefill(attention, qkv, ends=(2 * S,), is_last=False)
    before = attention.policy.scores(0, 0)
    attention.reset()
    prefill(attention, qkv, is_last=True)
    after = attention.policy.scores(0, 0)
    np.testing.assert_array_equal(after, before)
    assert (after[2 * S :] == 0.0).all()
    prefill_decode = random_qkv(4, n_tokens=3 * S, **SHAPE.heads)
    attention.reset()
    prefill(attention, prefill_decode, ends=(3 * S - 1,))
    before = attention.policy.scores(0, 0)
    decode(attention, prefill_decode, 3 * S - 1)
    np.testing.assert_array_equal(attention.policy.scores(0, 0), before)


@pytest.mark.parametrize(("local", "heavy"), [(4, 12), (30, 4), (0, 80)])
def test_prefill_goes_on_after_decode(local: int, heavy: int) -> None:
    """A chat turn: generated tokens are candidates like those of the chunk before them."""
    n_prompt, n_decoded, n_more = 3 * S, 11, S + 7
    n_tokens = n_prompt + n_decoded + n_more
    q, k, v = separated(n_tokens, 4, 12)
    attention = make_attention(
        _core.h2o_policy(local, heavy), SHAPE, chunk_size=S, max_context=n_tokens
    )
    prefill(attention, (q, k, v), ends=(n_prompt,))
    for position in range(n_prompt, n_prompt + n_decoded):
        decode(attention, (q, k, v), position)
    policy = attention.policy
    previous = [policy.memory_set(0, head) for head in range(SHAPE.n_kv_heads)]
    scores = [policy.scores(0, head).astype(np.float64) for head in range(SHAPE.n_kv_heads)]
    begin, end = n_prompt + n_decoded, n_prompt + n_decoded + S
    rows = [np.ascontiguousarray(array[:, begin:end].swapaxes(0, 1)) for array in (q, k, v)]
    output = attention.run(0, *rows, is_last=False)
    for head in range(SHAPE.n_kv_heads):
        expected, _ = select_memory(
            scores[head], previous[head], (n_prompt - S, begin), local=local, heavy=heavy
        )
        positions = policy.memory_set(0, head)
        np.testing.assert_array_equal(positions, expected)
        keys = np.concatenate([positions, np.arange(begin, end)])
        heads = slice(head * SHAPE.group, (head + 1) * SHAPE.group)
        state, _ = attend(
            q[heads, begin:end],
            k[head, keys],
            v[head, keys],
            scale=8**-0.5,
            visible=keys[None, :] <= np.arange(begin, end)[:, None],
        )
        np.testing.assert_allclose(output[:, heads].swapaxes(0, 1), state.o, atol=1e-5)


@pytest.mark.parametrize("tail", [1, 5, S, 2 * S + 9, 10 * S])
@pytest.mark.parametrize("calls", [1, 3])
def test_a_dense_tail_equals_the_oracle(tail: int, calls: int) -> None:
    """The last queries of the last call read everything; what comes before them does not."""
    n_tokens = 5 * S + 7
    ends = (n_tokens,) if calls == 1 else (2 * S, 4 * S, n_tokens)
    qkv = separated(n_tokens, 4, 6)
    layer = H2OLayer(chunk_size=S, local=4, heavy=6, tail=tail)
    expected = [
        layer.prefill(*(array[:, start:end] for array in qkv), is_last=end == n_tokens)
        for start, end in pairwise((0, *ends))
    ]
    attention = make_attention(
        _core.h2o_policy(4, 6, tail=tail), SHAPE, chunk_size=S, max_context=n_tokens
    )
    output = prefill(attention, qkv, ends=ends)
    np.testing.assert_allclose(output, np.concatenate(expected, axis=1), atol=2e-5)
    n_tail = min(tail, n_tokens - (0 if calls == 1 else ends[-2]))
    dense = causal_attention(qkv[0][:, -n_tail:], *qkv[1:])
    np.testing.assert_allclose(output[:, -n_tail:], dense, atol=2e-5)
    # A tail as long as its call leaves no chunk before it there.
    n_sparse = n_tokens - n_tail
    pairs = pairs_chunked(n_sparse, chunk_size=S, memory_size=10)
    assert attention.pairs_computed == pairs + pairs_dense(n_tokens) - pairs_dense(n_sparse)
    # The state is that of the whole call, the tail at its end.
    _, _, rows = attention.state()
    np.testing.assert_array_equal(head_major(rows)[:, -n_tail:], output[:, -n_tail:])
    m, l, _ = attention.state()  # noqa: E741
    logits = np.einsum("hd,hjd->hj", qkv[0][:, -1], np.repeat(qkv[1], SHAPE.group, axis=0)) / 8**0.5
    np.testing.assert_allclose(m[-1], logits.max(axis=1), atol=1e-5)
    total = np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(l[-1], total, rtol=1e-5)


def test_a_prompt_that_goes_on_has_no_tail() -> None:
    qkv = random_qkv(5, n_tokens=3 * S, **SHAPE.heads)
    outputs = [
        prefill(
            make_attention(
                _core.h2o_policy(4, 6, tail=tail), SHAPE, chunk_size=S, max_context=3 * S
            ),
            qkv,
            is_last=False,
        )
        for tail in (0, 20)
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])


@pytest.mark.parametrize("tail", [1, 9, S, 10 * S])
@pytest.mark.parametrize("name", ["h2o", "headwise"])
def test_a_tail_of_a_turn_counts_as_decoded_tokens(name: str, tail: int) -> None:
    """A prompt that another may follow: its tail reads everything and is scored no more."""

    def make(tail: int) -> _core.ChunkedAttention:
        if name == "h2o":
            policy = _core.h2o_policy(4, 6, tail=tail)
        else:
            budgets = [9, None, 20][: SHAPE.n_kv_heads]
            policy = _core.headwise_policy(budgets, local=4, page_size=8, tail=tail)
        return make_attention(policy, SHAPE, chunk_size=S, max_context=n_tokens)

    n_turn, n_tokens = 3 * S + 5, 6 * S
    qkv = random_qkv(7, n_tokens=n_tokens, **SHAPE.heads)
    attention = make(tail)
    turn = prefill(attention, qkv, ends=(n_turn,), stays_open=True)
    after = prefill(attention, qkv, first=n_turn, ends=(n_tokens,))
    # What comes before the tail, if anything does, and then one token after the other.
    decoding = make(0)
    n_head = max(0, n_turn - tail)
    parts = [prefill(decoding, qkv, ends=(n_head,), is_last=False)] if n_head else []
    parts += [decode(decoding, qkv, position) for position in range(n_head, n_turn)]
    np.testing.assert_allclose(turn, np.concatenate(parts, axis=1), atol=2e-5)
    decoding_after = prefill(decoding, qkv, first=n_turn, ends=(n_tokens,))
    n_sparse = n_tokens - n_turn - min(tail, n_tokens - n_turn)
    np.testing.assert_array_equal(after[:, :n_sparse], decoding_after[:, :n_sparse])
    dense = causal_attention(qkv[0][:, n_turn + n_sparse :], *qkv[1:])
    np.testing.assert_allclose(after[:, n_sparse:], dense, atol=2e-5)

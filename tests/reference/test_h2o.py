"""Self-checks of the H2O oracle: against hand-computed values and exact identities."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference.dense import DenseLayer, causal_attention
from tests.reference.h2o import H2OLayer
from tests.reference.heavy_hitters import select_memory
from tests.reference.qkv import random_qkv, separated_qkv
from tests.reference.softmax_state import attend

SHAPE = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 8}
GROUP = SHAPE["n_heads"] // SHAPE["n_kv_heads"]
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def uniform_qkv(n_tokens: int, *, group: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All logits equal, so every weight of a row is one over the number of visible keys."""
    zeros = np.zeros((1, n_tokens, 1))
    return np.zeros((group, n_tokens, 1)), zeros, zeros


@pytest.mark.parametrize("group", [1, 2])
def test_scores_of_uniform_attention_by_hand(group: int) -> None:
    layer = H2OLayer(chunk_size=2, local=1, heavy=1)
    layer.prefill(*uniform_qkv(6, group=group))
    # Chunk sums are [1 + 1/2, 1/2]; a memory of two keys gains two rows of 1/2 each.
    assert [chunk.memory[0].tolist() for chunk in layer.chunks] == [[], [0, 1], [0, 3]]
    np.testing.assert_allclose(
        layer.scores[0], group * np.array([3.5, 1.5, 1.5, 1.5, 1.5, 0.5]), **TIGHT
    )


def test_scores_of_a_peaked_key_by_hand() -> None:
    q = np.ones((1, 4, 1))
    k = np.array([0.0, np.log(3.0), 0.0, 0.0]).reshape(1, 4, 1)
    layer = H2OLayer(chunk_size=2, local=1, heavy=1, scale=1.0)
    layer.prefill(q, k, np.zeros_like(k))
    # Chunk 0: rows [1, 0], [1/4, 3/4]. Chunk 1 reads keys 0 and 1 with 1/4 and 3/4, twice.
    np.testing.assert_allclose(layer.scores[0], [1.25 + 0.5, 0.75 + 1.5, 1.5, 0.5], **TIGHT)


def test_ties_go_to_the_lower_position() -> None:
    layer = H2OLayer(chunk_size=2, local=1, heavy=2)
    layer.prefill(*uniform_qkv(6))
    # Positions 1 and 2 tie at 1.5 for the second place.
    assert layer.chunks[2].memory[0].tolist() == [0, 1, 3]
    assert layer.chunks[2].margins[0] == 0.0


def test_select_memory_separates_local_and_heavy() -> None:
    scores = np.array([5.0, 1.0, 9.0, 2.0, 7.0, 0.5, 8.0, 8.0])
    positions, margin = select_memory(scores, np.array([0, 2]), (4, 8), local=2, heavy=2)
    assert positions.tolist() == [2, 4, 6, 7]
    assert margin == 2.0
    positions, margin = select_memory(scores, np.array([0, 2]), (4, 8), local=0, heavy=3)
    assert positions.tolist() == [2, 6, 7]
    positions, margin = select_memory(scores, np.array([0, 2]), (4, 8), local=3, heavy=0)
    assert positions.tolist() == [5, 6, 7]
    assert margin == np.inf


@pytest.mark.parametrize("n_tokens", [16, 17, 31, 32, 33, 40, 61])
@pytest.mark.parametrize(("local", "heavy"), [(4, 4), (0, 5), (6, 0), (3, 40)])
def test_memory_sets_keep_their_contract(n_tokens: int, local: int, heavy: int) -> None:
    layer = H2OLayer(chunk_size=16, local=local, heavy=heavy)
    layer.prefill(*random_qkv(1, n_tokens=n_tokens, **SHAPE))
    for chunk in layer.chunks:
        for positions in chunk.memory:
            assert len(positions) == min(local + heavy, chunk.start)
            assert np.all(np.diff(positions) > 0)
            assert np.all((positions >= 0) & (positions < chunk.start))
            expected_local = np.arange(max(0, chunk.start - local), chunk.start)
            assert np.array_equal(positions[len(positions) - len(expected_local) :], expected_local)


def test_fusion_equals_one_softmax_over_both_key_sets() -> None:
    q, k, v = random_qkv(2, n_tokens=40, **SHAPE)
    q *= 20.0  # logits up to about 100 in magnitude
    layer = H2OLayer(chunk_size=16, local=3, heavy=5)
    output = layer.prefill(q, k, v)
    for chunk in layer.chunks:
        own = np.arange(chunk.start, chunk.stop)
        for head in range(SHAPE["n_heads"]):
            kv_head = head // GROUP
            memory = chunk.memory[kv_head]
            keys = np.concatenate([memory, own])
            visible = keys[None, :] <= own[:, None]
            state, _ = attend(
                q[head, own], k[kv_head, keys], v[kv_head, keys], scale=8**-0.5, visible=visible
            )
            np.testing.assert_allclose(output[head, own], state.o, **TIGHT)


def test_one_chunk_equals_dense() -> None:
    q, k, v = random_qkv(3, n_tokens=16, **SHAPE)
    for chunk_size in (16, 17, 100):
        layer = H2OLayer(chunk_size=chunk_size, local=2, heavy=2)
        np.testing.assert_allclose(layer.prefill(q, k, v), causal_attention(q, k, v), **TIGHT)


@pytest.mark.parametrize(("local", "heavy"), [(64, 0), (0, 64), (30, 34)])
def test_memory_for_everything_equals_dense(local: int, heavy: int) -> None:
    q, k, v = random_qkv(4, n_tokens=64, **SHAPE)
    layer = H2OLayer(chunk_size=16, local=local, heavy=heavy)
    np.testing.assert_allclose(layer.prefill(q, k, v), causal_attention(q, k, v), **TIGHT)


def test_column_sums_sum_to_queries_times_group() -> None:
    layer = H2OLayer(chunk_size=16, local=3, heavy=4)
    layer.prefill(*random_qkv(5, n_tokens=41, **SHAPE))
    for chunk in layer.chunks:
        n_rows = GROUP * (chunk.stop - chunk.start)
        np.testing.assert_allclose(chunk.intra_sums.sum(axis=1), n_rows, **TIGHT)
        expected = n_rows if chunk.start else 0
        np.testing.assert_allclose([sums.sum() for sums in chunk.inter_sums], expected, **TIGHT)


def test_scores_never_fall_and_heads_differ() -> None:
    layer = H2OLayer(chunk_size=16, local=3, heavy=4)
    layer.prefill(*random_qkv(6, n_tokens=80, **SHAPE))
    for before, after in zip(layer.chunks[:-1], layer.chunks[1:], strict=True):
        assert np.all(after.scores[:, : before.stop] >= before.scores)
    assert np.all(np.isfinite(layer.scores)) and np.all(layer.scores > 0.0)
    assert any(not np.array_equal(*chunk.memory) for chunk in layer.chunks)


@pytest.mark.parametrize("batches", [[32, 32], [16, 48], [16, 16, 16, 16], [48, 7]])
def test_calls_equal_one_call_on_chunk_boundaries(batches: list[int]) -> None:
    q, k, v = random_qkv(7, n_tokens=sum(batches), **SHAPE)
    whole = H2OLayer(chunk_size=16, local=3, heavy=4)
    expected = whole.prefill(q, k, v)
    layer = H2OLayer(chunk_size=16, local=3, heavy=4)
    ends = np.cumsum(batches)
    parts = [
        layer.prefill(q[:, end - n : end], k[:, end - n : end], v[:, end - n : end])
        for n, end in zip(batches, ends, strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)
    np.testing.assert_array_equal(layer.scores, whole.scores)
    assert [chunk.start for chunk in layer.chunks] == [chunk.start for chunk in whole.chunks]


def test_calls_shorter_than_the_local_window_keep_it_contiguous() -> None:
    q, k, v = random_qkv(8, n_tokens=24, **SHAPE)
    layer = H2OLayer(chunk_size=16, local=6, heavy=2)
    for start in range(0, 24, 3):
        layer.prefill(*(array[:, start : start + 3] for array in (q, k, v)))
    for chunk in layer.chunks:
        expected = np.arange(max(0, chunk.start - 6), chunk.start)
        for positions in chunk.memory:
            assert np.isin(expected, positions).all()
            assert len(positions) == min(8, chunk.start)


def test_a_sink_of_the_first_chunk_survives_to_the_last() -> None:
    q, k, v = random_qkv(9, n_tokens=128, **SHAPE)
    direction = np.ones(SHAPE["head_dim"])
    q += direction
    k[:, 2] = 10.0 * direction
    layer = H2OLayer(chunk_size=16, local=3, heavy=1)
    layer.prefill(q, k, v)
    for chunk in layer.chunks[1:]:
        assert all(positions[0] == 2 for positions in chunk.memory)


def test_permuting_heads_of_a_group_keeps_the_memory() -> None:
    q, k, v = random_qkv(10, n_tokens=64, **SHAPE)
    order = [2, 0, 1, 4, 5, 3]
    layers = [H2OLayer(chunk_size=16, local=2, heavy=4) for _ in range(2)]
    expected = layers[0].prefill(q, k, v)
    np.testing.assert_allclose(layers[1].prefill(q[order], k, v), expected[order], **TIGHT)
    for a, b in zip(*(layer.chunks for layer in layers), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a.memory, b.memory, strict=True))


def test_decode_is_full_attention_with_frozen_scores() -> None:
    q, k, v = random_qkv(11, n_tokens=50, **SHAPE)
    layer, dense = H2OLayer(chunk_size=16, local=3, heavy=4), DenseLayer()
    for state in (layer, dense):
        state.prefill(q[:, :49], k[:, :49], v[:, :49])
    scores = layer.scores.copy()
    last = (q[:, 49:], k[:, 49:], v[:, 49:])
    np.testing.assert_array_equal(layer.decode(*last), dense.decode(*last))
    np.testing.assert_array_equal(layer.scores, scores)
    assert len(layer.chunks) == 4


def test_separated_qkv_decides_every_choice() -> None:
    def make_layer() -> H2OLayer:
        return H2OLayer(chunk_size=16, local=4, heavy=4)

    q, k, v = separated_qkv(0, make_layer, n_tokens=64, min_margin=1e-3, **SHAPE)
    layer = make_layer()
    layer.prefill(q, k, v)
    assert min(chunk.margins.min() for chunk in layer.chunks) >= 1e-3
    with pytest.raises(ValueError, match="no seed"):
        separated_qkv(0, make_layer, n_tokens=64, min_margin=50.0, **SHAPE)


def test_select_memory_forces_sinks() -> None:
    scores = np.array([0.0, 1.0, 9.0, 2.0, 7.0, 0.5, 8.0, 8.0])
    positions, margin = select_memory(scores, np.array([0, 2]), (4, 8), local=1, heavy=1, sinks=1)
    assert positions.tolist() == [0, 2, 7] and margin == 1.0
    # Sinks and local overlap: nothing is listed twice.
    positions, _ = select_memory(scores, np.array([0]), (1, 3), local=2, heavy=1, sinks=2)
    assert positions.tolist() == [0, 1, 2]


def test_decay_by_hand() -> None:
    layer = H2OLayer(chunk_size=2, local=1, heavy=1, decay=0.5)
    layer.prefill(*uniform_qkv(6))
    # [1.5, .5]; then + two halves on 1.5 / 2 and .5 / 2; then the same for keys 0 and 3.
    np.testing.assert_allclose(layer.scores[0], [1.875, 1.25, 1.5, 1.25, 1.5, 0.5], **TIGHT)


@pytest.mark.parametrize("n_tokens", [6, 96])
def test_lift_of_uniform_attention_is_one(n_tokens: int) -> None:
    """Every s_j / n_j is 1 per query head, whatever part and chunk the key was seen in."""
    layer = H2OLayer(chunk_size=n_tokens // 3, local=1, heavy=1, score="lift", decay=0.5)
    layer.prefill(*uniform_qkv(n_tokens, group=2))
    sums = layer._column_sums
    np.testing.assert_allclose(sums.sums, 2.0 * sums.ages, **TIGHT)
    assert np.all(sums.ages > 0.0)


def test_a_mean_counts_at_least_32_queries() -> None:
    layer = H2OLayer(chunk_size=40, local=1, heavy=1, score="mean")
    layer.prefill(*uniform_qkv(40))
    harmonic = np.cumsum(1.0 / np.arange(40, 0, -1))[::-1]  # sum over i >= j of 1 / (i + 1)
    ages = np.arange(40, 0, -1)
    np.testing.assert_allclose(layer.scores[0], harmonic, **TIGHT)
    np.testing.assert_allclose(layer._scores_of(0), harmonic / np.maximum(ages, 32), **TIGHT)


def test_a_window_sees_the_last_queries_of_one_chunk() -> None:
    layer = H2OLayer(chunk_size=4, local=0, heavy=2, score="window", window=2)
    layer.prefill(*uniform_qkv(8))
    # Rows 3 and 4 of a chunk give 1/3 and 1/4; the memory of chunk 1 gets two halves of each.
    third, fourth = 1 / 3 + 1 / 4, 1 / 4
    np.testing.assert_allclose(layer.chunks[0].scores[0], [third, third, third, fourth], **TIGHT)
    assert layer.chunks[1].memory[0].tolist() == [0, 1]
    np.testing.assert_allclose(
        layer.scores[0], [1.0, 1.0, third, fourth, third, third, third, fourth], **TIGHT
    )


def test_value_norms_decide() -> None:
    q, k, v = uniform_qkv(4)
    v = np.array([1.0, -4.0, 1.0, 1.0]).reshape(1, 4, 1)
    layer = H2OLayer(chunk_size=2, local=0, heavy=1, by_values=True)
    layer.prefill(q, k, v)
    # Sums 1.5 and 0.5 times the norms 1 and 4.
    assert layer.chunks[1].memory[0].tolist() == [1]
    assert layer.chunks[1].margins[0] == 0.5


def test_the_last_chunk_of_a_prompt_adds_nothing() -> None:
    q, k, v = random_qkv(12, n_tokens=48, **SHAPE)
    layer, before = (H2OLayer(chunk_size=16, local=3, heavy=4) for _ in range(2))
    layer.prefill(q, k, v, is_last=True)
    before.prefill(*(array[:, :32] for array in (q, k, v)))
    np.testing.assert_array_equal(layer.scores[:, :32], before.scores)
    assert not layer.scores[:, 32:].any()


def test_settings_that_select_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="local"):
        H2OLayer(chunk_size=16, local=0, heavy=0)

"""Self-checks of the headwise oracle: against hand-computed values and exact identities."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference.dense import DenseLayer, causal_attention
from tests.reference.headwise import HeadwiseLayer, recall_page_size
from tests.reference.landmarks import landmark_page_sizes, make_landmarks
from tests.reference.qkv import random_qkv

SHAPE = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 8}
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def uniform_qkv(n_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    zeros = np.zeros((1, n_tokens, 1))
    return zeros, zeros, np.arange(1.0, n_tokens + 1).reshape(1, n_tokens, 1)


def test_scores_of_uniform_attention_by_hand() -> None:
    layer = HeadwiseLayer(chunk_size=2, budgets=[2], local=1, sinks=0, decay=0.5, page_size=0)
    output = layer.prefill(*uniform_qkv(6))
    # Chunk 0: rows [1], [1/2, 1/2]. Then rows see 3 and 4 keys, two of them in the memory.
    two_rows, own = 1 / 3 + 1 / 4, np.array([1 / 3 + 1 / 4, 1 / 4])
    assert [chunk.memory[0].tolist() for chunk in layer.chunks] == [[], [0, 1], [0, 3]]
    first = [1.5 / 2 + two_rows, 0.5 / 2 + two_rows, *own]
    np.testing.assert_allclose(layer.chunks[1].scores[0], first, **TIGHT)
    second = [first[0] / 2 + two_rows, first[1], own[0], own[1] / 2 + two_rows, *own]
    np.testing.assert_allclose(layer.chunks[2].scores[0], second, **TIGHT)
    # Values are position + 1.
    np.testing.assert_allclose(output.ravel(), [1, 1.5, 2, 2.5, 10 / 3, 4], **TIGHT)


def test_landmarks_by_hand() -> None:
    k = np.arange(10.0).reshape(10, 1)
    marks = make_landmarks(k, -k, np.array([0, 1, 2, 5]), 8, page_size=3)
    # Page 0 is complete, page 1 misses 3 and 4, page 2 ends after the chunk begins.
    assert marks.keys.tolist() == [[3.5]] and marks.values.tolist() == [[-3.5]]
    assert marks.counts.tolist() == [2.0]
    assert len(make_landmarks(k, k, np.array([0]), 8, page_size=0).counts) == 0
    assert len(make_landmarks(k, k, np.arange(9), 9, page_size=3).counts) == 0


def test_pages_of_a_long_past_grow_from_the_oldest_on() -> None:
    sizes = [landmark_page_sizes(n_pages, 4) for n_pages in range(3, 10)]
    assert sizes[:4] == [[1, 1, 1], [1, 1, 1, 1], [2, 1, 1, 1], [2, 2, 1, 1]]
    assert sizes[4:] == [[2, 2, 2, 1], [4, 2, 1, 1], [4, 2, 2, 1]]
    long = landmark_page_sizes(1000, 32)
    assert len(long) == 32 and sum(long) == 1000 and long == sorted(long, reverse=True)


def test_landmarks_of_a_long_past_by_hand() -> None:
    """33 pages where 32 may be: the first two are one."""
    k = np.arange(66.0).reshape(66, 1)
    marks = make_landmarks(k, -k, np.array([1, *range(4, 66)]), 66, page_size=2, n_fine=64)
    assert marks.keys.tolist() == [[5 / 3]] and marks.values.tolist() == [[-5 / 3]]
    assert marks.counts.tolist() == [3.0]


def test_recall_pages_double_with_the_past() -> None:
    sizes = [recall_page_size(start, 8192) for start in (8193, 16384 + 15, 16384 + 16, 32768 + 31)]
    assert sizes == [16, 16, 32, 32]
    assert recall_page_size(32768 + 32, 8192) == 64


def test_a_landmark_takes_the_mass_of_the_keys_left_out() -> None:
    """All logits 0, no memory but position 1: the page weighs as much as its one key left out."""
    layer = HeadwiseLayer(chunk_size=2, budgets=[1], local=0, sinks=0, page_size=2)
    layer.prefill(*uniform_qkv(4))
    chunk = layer.chunks[1]
    assert chunk.memory[0].tolist() == [0] and chunk.landmarks[0].counts.tolist() == [1.0]
    # Row 2 has weights 1/3, row 3 has 1/4: the landmark is in the denominator, and not scored.
    np.testing.assert_allclose(chunk.scores[0, 0], 0.9 * 1.5 + 1 / 3 + 1 / 4, **TIGHT)
    np.testing.assert_allclose(chunk.scores[0, 1], 0.5, **TIGHT)


@pytest.mark.parametrize("page_size", [4, 8, 16])
def test_pages_of_equal_keys_equal_dense(page_size: int) -> None:
    """n equal keys and their landmark are the same, whatever the values and the budget."""
    q, k, v = random_qkv(1, n_tokens=64, **SHAPE)
    k = np.repeat(k[:, ::page_size], page_size, axis=1)
    layer = HeadwiseLayer(chunk_size=16, budgets=[5, 20], local=4, sinks=1, page_size=page_size)
    np.testing.assert_allclose(layer.prefill(q, k, v), causal_attention(q, k, v), **TIGHT)
    assert len(layer.chunks[-1].landmarks[0].counts) > 0


@pytest.mark.parametrize("budgets", [(None, None), (64, 1000), (None, 48)])
def test_budgets_for_everything_equal_dense(budgets: tuple[int | None, ...]) -> None:
    q, k, v = random_qkv(2, n_tokens=64, **SHAPE)
    layer = HeadwiseLayer(chunk_size=16, budgets=budgets, page_size=8)
    np.testing.assert_allclose(layer.prefill(q, k, v), causal_attention(q, k, v), **TIGHT)


def test_memory_and_chunk_receive_all_weight_without_landmarks() -> None:
    q, k, v = random_qkv(3, n_tokens=64, **SHAPE)
    layer = HeadwiseLayer(chunk_size=16, budgets=[9, None], decay=1.0, page_size=0)
    layer.prefill(q, k, v)
    np.testing.assert_allclose(layer.chunks[-1].scores.sum(axis=1), [3 * 64, 0], **TIGHT)


def test_memory_sets_hold_sinks_local_and_no_more_than_the_budget() -> None:
    layer = HeadwiseLayer(chunk_size=16, budgets=[12, 7], local=5, sinks=4, page_size=16)
    layer.prefill(*random_qkv(4, n_tokens=75, **SHAPE))
    for chunk in layer.chunks[1:]:
        for positions, budget, sinks, local in zip(
            chunk.memory, (12, 7), (3, 1), (5, 3), strict=True
        ):
            assert len(positions) == budget and np.all(np.diff(positions) > 0)
            assert positions[:sinks].tolist() == list(range(sinks))
            assert positions[-local:].tolist() == list(range(chunk.start - local, chunk.start))


def test_calls_equal_one_call_on_chunk_boundaries() -> None:
    qkv = random_qkv(5, n_tokens=55, **SHAPE)
    whole, split = (HeadwiseLayer(chunk_size=16, budgets=[9, 30], page_size=8) for _ in range(2))
    expected = whole.prefill(*qkv)
    parts = [
        split.prefill(*(array[:, start:stop] for array in qkv))
        for start, stop in ((0, 32), (32, 55))
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)
    np.testing.assert_array_equal(split.chunks[-1].scores, whole.chunks[-1].scores)


def test_decode_is_full_attention_and_the_last_chunk_adds_nothing() -> None:
    qkv = random_qkv(6, n_tokens=50, **SHAPE)
    layer, dense = HeadwiseLayer(chunk_size=16, budgets=[9, 30]), DenseLayer()
    for state in (layer, dense):
        state.prefill(*(array[:, :48] for array in qkv), is_last=True)
    assert not layer.chunks[-1].scores[:, 32:].any()
    for position in (48, 49):
        row = [array[:, position : position + 1] for array in qkv]
        np.testing.assert_array_equal(layer.decode(*row), dense.decode(*row))
    assert len(layer.chunks) == 3

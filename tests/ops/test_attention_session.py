"""What `ChunkedAttention` does for other runtimes: fused rows, rotary embedding, saved state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeh2o import _core

Array = NDArray[Any]

N_HEADS, N_KV_HEADS, HEAD_DIM = 4, 2, 16
WIDTH = (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM


def make_attention(policy: _core.SparsePolicy | None = None) -> _core.ChunkedAttention:
    return _core.ChunkedAttention(
        policy or _core.dense_policy(),
        N_HEADS,
        N_KV_HEADS,
        HEAD_DIM,
        chunk_size=8,
        batch_size=32,
        max_context=64,
        cache_type="f32",
    )


def make_qkv(n_tokens: int, seed: int = 0) -> Array:
    """Fused rows [n_tokens, heads, head_dim]: queries, then keys, then values."""
    rows = np.random.default_rng(seed).standard_normal((n_tokens, WIDTH)).astype(np.float32)
    return rows.reshape(n_tokens, -1, HEAD_DIM)


def split(qkv: Array) -> tuple[Array, Array, Array]:
    """Views of the fused rows."""
    return tuple(np.split(qkv, [N_HEADS, N_HEADS + N_KV_HEADS], axis=1))  # type: ignore[return-value]


def make_tables(n_tokens: int, n_pairs: int, first: int = 0) -> tuple[Array, Array]:
    angles = np.arange(first, first + n_tokens)[:, None] / 50.0 ** (np.arange(n_pairs) / n_pairs)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """The rotary embedding in float64 (Su et al. 2021, arXiv 2104.09864)."""
    n_pairs = cos.shape[1]
    out = x.astype(np.float64)
    first = np.s_[..., 0 : 2 * n_pairs : 2] if interleaved else np.s_[..., :n_pairs]
    second = np.s_[..., 1 : 2 * n_pairs : 2] if interleaved else np.s_[..., n_pairs : 2 * n_pairs]
    a, b, c, s = x[first], x[second], cos[:, None], sin[:, None]
    out[first], out[second] = a * c - b * s, a * s + b * c
    return out


def attend(q: Array, k: Array, v: Array) -> Array:
    """Causal attention in float64; q may be the last rows of a longer prompt."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1).astype(np.float64) for x in (k, v))
    logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[2])
    past = len(k) - len(q)
    hidden = np.arange(len(k)) > np.arange(len(q))[:, None] + past
    weights = np.exp(np.where(hidden, -np.inf, logits))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_pairs", [HEAD_DIM // 2, 3])
def test_rotates_fused_rows_where_they_lie(interleaved: bool, n_pairs: int) -> None:
    qkv = make_qkv(20)
    original = qkv.copy()
    q, k, v = split(qkv)
    tables = make_tables(20, n_pairs)
    expected = attend(
        rotate(q, *tables, interleaved=interleaved), rotate(k, *tables, interleaved=interleaved), v
    )
    out = np.empty((20, N_HEADS, HEAD_DIM), np.float32)
    attention = make_attention()
    result = attention.run(
        0, q, k, v, is_last=True, rotary=tables, is_interleaved=interleaved, out=out
    )
    assert result is out or np.shares_memory(result, out)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert not np.array_equal(q, split(original)[0])
    np.testing.assert_array_equal(v, split(original)[2])


def test_decode_rotates_at_its_position() -> None:
    qkv = make_qkv(9)
    q, k, v = (part.copy() for part in split(qkv))
    tables = make_tables(9, HEAD_DIM // 2)
    expected = attend(*(rotate(x, *tables, interleaved=False) for x in (q, k)), v)
    attention = make_attention()
    before, last = split(qkv[:8].copy()), split(qkv[8:].copy())
    attention.run(0, *before, is_last=True, rotary=(tables[0][:8], tables[1][:8]))
    result = attention.decode(0, *last, rotary=(tables[0][8:], tables[1][8:]))
    np.testing.assert_allclose(result[0], expected[8], atol=2e-6)


def test_read_only_rows_are_rotated_elsewhere() -> None:
    qkv = make_qkv(5)
    writable = make_attention().run(0, *split(qkv.copy()), is_last=True, rotary=make_tables(5, 8))
    qkv.setflags(write=False)
    original = qkv.copy()
    result = make_attention().run(0, *split(qkv), is_last=True, rotary=make_tables(5, 8))
    np.testing.assert_array_equal(result, writable)
    np.testing.assert_array_equal(qkv, original)


@pytest.mark.parametrize("rows", ["reversed", "float64", "transposed"])
def test_takes_rows_in_any_layout(rows: str) -> None:
    q, k, v = (part.copy() for part in split(make_qkv(6)))
    expected = make_attention().run(0, q, k, v, is_last=True)
    if rows == "reversed":
        q = q[::-1].copy()[::-1]
    elif rows == "float64":
        k = k.astype(np.float64)
    else:
        v = v.transpose(2, 1, 0).copy().transpose(2, 1, 0)
    np.testing.assert_array_equal(make_attention().run(0, q, k, v, is_last=True), expected)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (make_tables(4, 8), "of 5 tokens"),
        (make_tables(5, 9), "9 pairs, the heads 16 dimensions"),
        ((make_tables(5, 8)[0], make_tables(5, 4)[1]), "must both be"),
    ],
)
def test_refuses_rotary_tables_that_do_not_fit(tables: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_attention().run(0, *split(make_qkv(5)), is_last=True, rotary=tables)


@pytest.mark.parametrize("out", [np.empty((5, 4, 8), np.float32), np.empty((4, 4, 16), np.float32)])
def test_refuses_an_output_of_another_shape(out: Array) -> None:
    with pytest.raises(ValueError, match=r"out must be a writable array"):
        make_attention().run(0, *split(make_qkv(5)), is_last=True, out=out)


def test_state_and_rows_go_on_elsewhere() -> None:
    policy = _core.h2o_policy(3, 4)
    attention = make_attention(policy)
    attention.run(0, *split(make_qkv(20)), is_last=False)
    attention.decode(0, *split(make_qkv(1, seed=1)))
    other = make_attention(_core.h2o_policy(3, 4))
    other.load_state(attention.save_state())
    for rows, copy in zip(attention.cached_rows(), other.cached_rows(), strict=True):
        copy[:] = rows
    assert (other.position(0), other.prefill_end) == (21, 20)
    assert other.pairs_computed == attention.pairs_computed
    assert other.pairs_dense == attention.pairs_dense == 20 * 21 // 2
    more = split(make_qkv(11, seed=2))
    np.testing.assert_array_equal(
        other.run(0, *more, is_last=True), attention.run(0, *more, is_last=True)
    )


def test_damaged_state_leaves_an_empty_session() -> None:
    attention = make_attention()
    attention.run(0, *split(make_qkv(8)), is_last=True)
    state = attention.save_state()
    for damaged in (state[:-1], state + b"\0", b"\xff" * len(state)):
        with pytest.raises(ValueError):
            attention.load_state(damaged)
        assert attention.position(0) == 0


def test_state_with_gaps_is_refused() -> None:
    """A view that skips bytes, or goes backwards, begins at its pointer and lies elsewhere."""
    attention = make_attention()
    attention.run(0, *split(make_qkv(8)), is_last=True)
    state = memoryview(attention.save_state())
    for view in (state[::-1], state[::2]):
        with pytest.raises(ValueError, match="contiguous bytes"):
            attention.load_state(view)
    attention.load_state(state)
    assert attention.position(0) == 8


def test_rewinds_to_the_end_of_the_prompt_only() -> None:
    attention = make_attention()
    attention.run(0, *split(make_qkv(8)), is_last=True)
    first = attention.decode(0, *split(make_qkv(1, seed=1)))
    attention.rewind(8)
    np.testing.assert_array_equal(attention.decode(0, *split(make_qkv(1, seed=1))), first)
    with pytest.raises(ValueError, match="cannot go back to position 7"):
        attention.rewind(7)


def test_estimates_what_it_allocates() -> None:
    sizes = {"n_layers": 3, "chunk_size": 8, "batch_size": 32, "max_context": 64}
    parts = _core.ChunkedAttention.estimate_bytes(_core.h2o_policy(2, 2), 4, 2, 16, **sizes)
    attention = _core.ChunkedAttention(_core.h2o_policy(2, 2), 4, 2, 16, **sizes)
    assert parts["kv_cache"] == attention.cache.n_bytes == 3 * 2 * 2 * 64 * 16 * 2
    assert parts["scratch"] > 0 and parts["scores"] > 0


@pytest.mark.skipif(
    "libomp" in Path("/proc/self/maps").read_text(), reason="LLVM's OpenMP lets them sleep instead"
)
def test_released_threads_end_and_come_back() -> None:
    def count_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def wait_for(n_threads: int) -> int:
        # Threads end by themselves, a moment after they were told to.
        for _ in range(1000):
            if count_threads() <= n_threads:
                break
            time.sleep(0.01)
        return count_threads()

    n_before = _core.num_threads()
    _core.set_num_threads(4)
    try:
        attention, qkv = make_attention(), make_qkv(32)
        expected = attention.run(0, *split(qkv), is_last=True)
        n_running = count_threads()
        _core.release_threads()
        assert wait_for(n_running - 3) <= n_running - 3
        attention.reset()
        np.testing.assert_array_equal(attention.run(0, *split(qkv), is_last=True), expected)
        assert count_threads() == n_running
    finally:
        _core.set_num_threads(n_before)

"""What the attention objects refuse, and how they say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeh2o import _core

SIZES = {"chunk_size": 8, "batch_size": 16, "max_context": 32}


def make(**changes: Any) -> _core.ChunkedAttention:
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    return _core.ChunkedAttention(_core.h2o_policy(2, 2), **{**heads, **SIZES, **changes})


def rows(n_tokens: int, *, n_heads: int = 4, head_dim: int = 8) -> tuple[np.ndarray, ...]:
    return tuple(
        np.zeros((n_tokens, heads, head_dim), np.float32)
        for heads in (n_heads, n_heads // 2, n_heads // 2)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "n_heads = 5 must be a positive multiple of n_kv_heads = 2"),
        ({"n_kv_heads": 0}, "n_kv_heads = 0"),
        ({"n_heads": 2**62, "n_kv_heads": 2**62}, "n_heads = 4611686018427387904 must be at most"),
        ({"head_dim": 12}, "head_dim = 12 must be a multiple of 8"),
        ({"n_layers": 0}, "n_layers"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"batch_size": 0}, "batch_size = 0 must be between 1 and 2147483647"),
        ({"batch_size": 2**62}, "batch_size = 4611686018427387904"),
        ({"max_context": 0}, "max_context = 0"),
        ({"max_context": 2**31}, "max_context = 2147483648"),
        ({"scale": 0.0}, "scale = 0 must be positive"),
        ({"cache_type": "q4_0"}, "cache type 'q4_0' is not supported; supported: f16, f32, q8_0"),
        ({"cache_type": "f16/q4_0"}, "cache type 'q4_0' is not supported"),
        ({"cache_type": "f16/f16/f16"}, "cache type 'f16/f16' is not supported"),
        ({"cache_type": "q8_0"}, "q8_0 needs heads of a multiple of 32 dimensions, not of 8; use"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_no_budget_at_all() -> None:
    with pytest.raises(ValueError, match="local \\+ heavy >= 1"):
        _core.h2o_policy(0, 0)


@pytest.mark.parametrize("budgets", [[-1], [1.5], [2**70], {}, None])
def test_options_that_are_none(budgets: Any) -> None:
    with pytest.raises(ValueError, match=r"^budgets must be "):
        _core.headwise_policy(budgets)


def test_calls_that_do_not_fit() -> None:
    attention = make()
    with pytest.raises(ValueError, match="1 to batch_size = 16 tokens, got 17"):
        attention.run(0, *rows(17), is_last=True)
    with pytest.raises(ValueError, match="tokens, got 0"):
        attention.run(0, *rows(0), is_last=True)
    with pytest.raises(ValueError, match=r"q must be \[8\]\[4\]\[8\], got \[8\]\[6\]\[8\]"):
        attention.run(0, *rows(8, n_heads=6), is_last=True)
    with pytest.raises(ValueError, match="k must be"):
        attention.run(0, rows(8)[0], *rows(7)[1:], is_last=True)
    with pytest.raises(ValueError, match="layer 1 does not exist"):
        attention.run(1, *rows(8), is_last=True)
    with pytest.raises(ValueError, match="decode takes one token"):
        attention.decode(0, *rows(2))
    with pytest.raises(ValueError, match="no state of a run"):
        attention.state()


def test_the_context_ends() -> None:
    attention = make()
    for _ in range(2):
        attention.run(0, *rows(16), is_last=False)
    with pytest.raises(ValueError, match="positions 32 to 33 exceed the context of 32"):
        attention.run(0, *rows(1), is_last=True)
    with pytest.raises(ValueError, match="exceed the context of 32"):
        attention.decode(0, *rows(1))
    assert attention.position(0) == 32


def test_a_policy_serves_one_session_at_a_time() -> None:
    policy = _core.h2o_policy(2, 2)
    attention = _core.ChunkedAttention(policy, 4, 2, 8, **SIZES)
    with pytest.raises(ValueError, match=r"h2o, local 2, heavy 2.*already serves"):
        _core.ChunkedAttention(policy, 4, 2, 8, **SIZES)
    del attention
    _core.ChunkedAttention(policy, 4, 2, 8, **SIZES)


def test_reading_state_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="serves no session yet"):
        _core.dense_policy().memory_set(0, 0)
    attention = _core.ChunkedAttention(_core.dense_policy(), 4, 2, 8, **SIZES)
    with pytest.raises(ValueError, match=r"dense.*keeps no scores"):
        attention.policy.scores(0, 0)
    with pytest.raises(ValueError, match="layer 0, KV head 2 does not exist"):
        attention.policy.memory_set(0, 2)
    h2o = make().policy
    with pytest.raises(ValueError, match="asked for the scores of 33 positions, there are 32"):
        h2o.scores(0, 0, 33)


def test_threads_are_those_of_the_sequence() -> None:
    before = _core.num_threads()
    try:
        _core.set_num_threads(1)
        attention, other = make(), make(threads=3)
        expected = attention.run(0, *rows(8), is_last=True)
        _core.set_num_threads(2)
        attention.reset()
        for each in (attention, other):
            np.testing.assert_array_equal(each.run(0, *rows(8), is_last=True), expected)
    finally:
        _core.set_num_threads(before)
    for threads in (0, 257):
        with pytest.raises(ValueError, match=f"between 1 and 256, got {threads}"):
            make(threads=threads)


def make_cache(head_dim: int, cache_type: str) -> _core.KvCache:
    """Of 2 layers, 3 KV heads and 16 positions."""
    sizes = {"n_layers": 2, "chunk_size": 8, "batch_size": 8, "max_context": 16}
    policy = _core.dense_policy()
    return _core.ChunkedAttention(policy, 3, 3, head_dim, cache_type=cache_type, **sizes).cache


def test_cache_views_outlive_their_cache() -> None:
    cache = make_cache(8, "f32")
    assert cache.n_bytes == 2 * 2 * 3 * 16 * 8 * 4
    view = cache.keys(1)
    assert view.shape == (3, 16, 8)
    view[:] = 7.0
    assert (cache.values(1) == 0.0).all()
    del cache
    assert (view == 7.0).all()
    with pytest.raises(ValueError, match="layer 2 does not exist"):
        make_cache(8, "f16").keys(2)


def test_view_of_a_quantised_cache_is_its_bytes() -> None:
    cache = make_cache(64, "q8_0")
    assert cache.n_bytes == 2 * 2 * 3 * 16 * 68
    view = cache.keys(1)
    assert view.shape == (3, 16, 68) and view.dtype == np.uint8
    view[:] = 7
    assert (cache.keys(1) == 7).all() and (cache.values(1) == 0).all()
    assert (cache.keys(0) == 0).all()

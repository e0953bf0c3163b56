"""The rule of ruvllm: the counts and the example of its definition, and the compiled policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from tests.ops.attention_case import Shape, decode, make_attention, prefill
from tests.reference.qkv import random_qkv
from tests.reference.ruvllm import RuvllmLayer, read_landmarks, read_tokens

# (tokens, landmarks) that all queries of so many tokens read, by default.
PAIRS = {
    129: (8_385, 68),
    256: (24_895, 387),
    512: (58_430, 1_348),
    1_000: (122_845, 3_725),
    1_024: (126_013, 3_845),
    2_048: (262_204, 9_926),
    4_096: (536_635, 24_199),
    8_192: (1_089_594, 56_904),
    16_384: (2_203_705, 130_569),
    32_768: (4_448_312, 294_346),
    65_536: (8_970_295, 654_731),
    131_072: (18_079_798, 1_441_100),
}
LENGTHS = (512, 1_024, 4_096, 8_192, 32_768)
# Totals with one setting changed.
VARIED: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"window": 64}, (33_633, 71_457, 308_897, 636_513, 2_684_385)),
    ({"window": 100}, (49_059, 105_315, 453_347, 928_419, 3_861_027)),
    ({"window": 256}, (100_291, 235_395, 1_056_515, 2_162_371, 8_879_683)),
    ({"block_size": 32}, (60_355, 130_979, 565_091, 1_154_883, 4_775_683)),
    ({"block_size": 128}, (59_201, 128_705, 556_481, 1_137_985, 4_709_441)),
    ({"globals": 0}, (59_396, 128_965, 556_871, 1_138_440, 4_710_026)),
    ({"globals": 4}, (60_918, 132_531, 572_717, 1_170_666, 4_840_548)),
    ({"strides": False}, (59_009, 126_593, 532_097, 1_072_769, 4_316_801)),
    ({"landmarks": False}, (58_430, 126_013, 536_635, 1_089_594, 4_448_312)),
    (
        {"globals": 0, "strides": False, "landmarks": False},
        (57_792, 123_840, 520_128, 1_048_512, 4_218_816),
    ),
]
DEFAULTS: dict[str, Any] = {
    "window": 128,
    "block_size": 64,
    "globals": 1,
    "strides": True,
    "landmarks": True,
}


def count_pairs(n_tokens: int, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and landmarks that the queries before every length read, [n_tokens] each."""
    o = DEFAULTS | options
    i = np.arange(n_tokens)
    window = np.minimum(i, o["window"])
    tokens = window + 1
    before = i - window  # tokens that the window has not
    n_globals = np.minimum(o["globals"], before)
    tokens += n_globals
    last = (i + 1) // o["block_size"] - 1
    landmarks = np.where(last >= 0, np.minimum(last + 1, 2), 0)
    for m in range(20 if o["strides"] else 0):
        at = i - 2**m
        tokens += (at >= n_globals) & (at < before)
        landmarks += (m > 0) & (last - 2**m >= 0)
    return tokens.cumsum(), (landmarks * o["landmarks"]).cumsum()


def test_pairs_of_the_published_table() -> None:
    tokens, landmarks = count_pairs(131_072, {})
    assert {n: (tokens[n - 1], landmarks[n - 1]) for n in PAIRS} == PAIRS


@pytest.mark.parametrize(("options", "totals"), VARIED, ids=str)
def test_pairs_with_one_setting_changed(options: dict[str, Any], totals: tuple[int, ...]) -> None:
    total = sum(count_pairs(max(LENGTHS), options))
    assert tuple(total[n - 1] for n in LENGTHS) == totals


@pytest.mark.parametrize("options", [{}, *(options for options, _ in VARIED)], ids=str)
def test_the_counts_are_those_of_the_oracle_and_of_the_policy(options: dict[str, Any]) -> None:
    n_tokens, o = 700, DEFAULTS | options
    tokens, landmarks = count_pairs(n_tokens, options)
    sets = [
        read_tokens(i, window=o["window"], globals=o["globals"], strides=o["strides"])
        for i in range(n_tokens)
    ]
    blocks = [
        read_landmarks(i, block_size=o["block_size"], strides=o["strides"])
        for i in range(n_tokens if o["landmarks"] else 0)
    ]
    assert sum(map(len, sets)) == tokens[-1]
    assert sum(map(len, blocks)) == landmarks[-1]
    shape = Shape(group=1, head_dim=8)
    attention = make_attention(
        _core.ruvllm_policy(**options), shape, chunk_size=1, max_context=n_tokens
    )
    prefill(attention, random_qkv(1, n_tokens=n_tokens, **shape.heads))
    assert attention.pairs_computed == tokens[-1] + landmarks[-1]


def test_the_example() -> None:
    """Window 2, blocks of 2, one head, q 1, K_j = j / 4, V_j = j."""
    assert read_tokens(5, window=2, globals=1).tolist() == [0, 1, 3, 4, 5]
    assert read_tokens(7, window=2, globals=1).tolist() == [0, 3, 5, 6, 7]
    assert read_landmarks(5, block_size=2).tolist() == [0, 1, 2]
    assert read_landmarks(7, block_size=2).tolist() == [1, 2, 3]
    expected = [0, 0.541559, 1.016216, 1.786477, 2.456632, 3.298614, 3.996293, 5.30382]
    j = np.arange(8.0)[None, :, None]
    # Of the first of the d = 8 channels that the caches hold; the others are 0.
    one = np.concatenate([np.full_like(j, np.sqrt(8.0)), np.zeros((1, 8, 7))], axis=2)
    qkv = one, one * j / 4 / np.sqrt(8.0), one * j / np.sqrt(8.0)
    oracle = RuvllmLayer(chunk_size=1, window=2, block_size=2)
    np.testing.assert_allclose(oracle.prefill(*qkv)[0, :, 0], expected, atol=1e-5)
    shape = Shape(n_kv_heads=1, group=1, head_dim=8)
    attention = make_attention(
        _core.ruvllm_policy(window=2, block_size=2), shape, chunk_size=1, max_context=8
    )
    np.testing.assert_allclose(prefill(attention, qkv)[0, :, 0], expected, atol=1e-5)


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
def test_chunks_of_one_token_and_decode_are_one(cache_type: str) -> None:
    """What a query reads does not depend on the length, nor on how it came."""
    n_tokens, options = 260, {"window": 30, "block_size": 16, "globals": 2}
    shape = Shape(head_dim=32)
    qkv = random_qkv(3, n_tokens=n_tokens, **shape.heads)
    sizes = {"chunk_size": 1, "max_context": n_tokens, "cache_type": cache_type}
    whole, stepped = (
        make_attention(_core.ruvllm_policy(**options), shape, **sizes) for _ in range(2)
    )
    expected = prefill(whole, qkv)
    prefill(stepped, qkv, ends=(100,), stays_open=True)
    # Landmarks are stored as the cache stores rows where generated tokens read them.
    atol = {"f32": 1e-5, "f16": 1e-3, "q8_0": 2e-2}[cache_type]
    for position in range(100, n_tokens):
        np.testing.assert_allclose(
            decode(stepped, qkv, position), expected[:, position : position + 1], atol=atol
        )
    # Blocks that were taken back are made anew.
    stepped.rewind(105)
    other = tuple(array[:, ::-1] for array in qkv)
    decode(stepped, other, 105)
    stepped.rewind(105)
    for position in range(105, 140):
        output = decode(stepped, qkv, position)
    np.testing.assert_allclose(output, expected[:, 139:140], atol=atol)


def test_a_window_over_everything_without_landmarks_is_dense() -> None:
    shape = Shape(head_dim=16)
    qkv = random_qkv(4, n_tokens=150, **shape.heads)
    policy = _core.ruvllm_policy(window=150, landmarks=False)
    sizes = {"chunk_size": 10, "max_context": 150}
    dense = make_attention(_core.dense_policy(), shape, **sizes)
    np.testing.assert_allclose(
        prefill(make_attention(policy, shape, **sizes), qkv), prefill(dense, qkv), atol=1e-6
    )


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        _core.ruvllm_policy(block_size=0)

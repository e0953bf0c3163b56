"""Causal attention with a bias by distance (ALiBi): prompts in chunks, and generated tokens."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from tests.joined_cases import for_each
from tests.ops.attention_case import Qkv, Shape, decode, make_attention, prefill
from tests.reference.cached_rows import DECODE_ATOL, stored
from tests.reference.dense import alibi_slopes, causal_attention
from tests.reference.qkv import random_qkv
from tests.sparse.policies import DENSE, POLICIES, PolicyCase

CLOSE = {"rtol": 0.0, "atol": 2e-5}
# How far outputs of narrower products may be off: test_attention_precision.py has the reasons.
LARGEST = {"f32": 2e-5, "bf16": 0.05, "f16": 0.02, "int8": 0.08, "int16": 0.01}
BIAS = 8.0

pytestmark = pytest.mark.usefixtures("isa")


def make(
    shape: Shape, max_context: int, chunk_size: int, **options: object
) -> _core.ChunkedAttention:
    return make_attention(
        _core.dense_policy(),
        shape,
        chunk_size=chunk_size,
        max_context=max_context,
        max_alibi_bias=BIAS,
        **options,  # type: ignore[arg-type]
    )


def rounded(qkv: Qkv, cache_type: str) -> Qkv:
    q, k, v = (array.astype(np.float32).astype(np.float64) for array in qkv)
    return q, stored(k, cache_type), stored(v, cache_type)


@pytest.mark.parametrize("n_kv_heads", [1, 3, 12])
@for_each("chunk_size", [1, 7, 64, 150, 1000])
def test_prompts_in_chunks(n_kv_heads: int, chunk_size: int) -> None:
    """Of heads whose number is no power of two, each by itself and in groups; in windows too."""
    shape = Shape(n_kv_heads=n_kv_heads, group=12 // n_kv_heads, head_dim=32)
    qkv = random_qkv(8, n_tokens=150, **shape.heads)
    for window in (None, 40):
        expected = causal_attention(*qkv, window=window, slopes=alibi_slopes(12))
        found = prefill(make(shape, 150, chunk_size), qkv, window=window or 0)
        np.testing.assert_allclose(found, expected, **CLOSE)
    assert np.abs(causal_attention(*qkv, window=40) - expected).mean() > 0.05


def test_several_calls_equal_one_exactly_where_memory_has_pieces() -> None:
    """Past keys are of the cache or of the call, in pieces of 1,024."""
    shape = Shape(n_kv_heads=2, group=1, head_dim=16)
    qkv = random_qkv(9, n_tokens=1300, **shape.heads)
    whole, split = (
        prefill(make(shape, 1300, 128), qkv, ends=ends) for ends in ((1300,), (256, 1152, 1300))
    )
    np.testing.assert_array_equal(split, whole)
    expected = causal_attention(*qkv, slopes=alibi_slopes(2))
    np.testing.assert_allclose(whole, expected, **CLOSE)


def test_every_precision() -> None:
    shape = Shape(n_kv_heads=3, group=2, head_dim=32)
    qkv = random_qkv(10, n_tokens=200, **shape.heads)
    expected = causal_attention(*qkv, slopes=alibi_slopes(6))
    for precision in _core.attention_precisions():
        found = prefill(make(shape, 200, 64, precision=precision), qkv)
        assert np.abs(found - expected).max() < LARGEST[precision], precision


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
@for_each("n_prompt", [1, 5, 255, 256, 257, 700])
def test_generated_tokens(cache_type: str, n_prompt: int) -> None:
    """In ranges of 256 keys, and in windows that begin within one."""
    shape = Shape(n_kv_heads=2, group=3, head_dim=32)
    qkv = random_qkv(11, n_tokens=n_prompt + 2, **shape.heads)
    q, k, v = rounded(qkv, cache_type)
    for window in (None, 300):
        attention = make(shape, n_prompt + 2, 64, cache_type=cache_type)
        prefill(attention, qkv, ends=(n_prompt,), window=window or 0)
        for end in (n_prompt + 1, n_prompt + 2):
            expected = causal_attention(
                q[:, end - 1 : end],
                k[:, :end],
                v[:, :end],
                window=window,
                slopes=alibi_slopes(6, BIAS),
            )
            found = decode(attention, qkv, end - 1, window=window or 0)
            np.testing.assert_allclose(found, expected, rtol=0, atol=DECODE_ATOL[cache_type])


@pytest.mark.usefixtures("keep_threads")
def test_threads_do_not_change_a_bit() -> None:
    shape = Shape(n_kv_heads=3, group=1, head_dim=16)
    qkv = random_qkv(12, n_tokens=700, **shape.heads)
    outputs = []
    for n_threads in (1, 2, 3):
        _core.set_num_threads(n_threads)
        attention = make(shape, 700, 100)
        of_prompt = prefill(attention, qkv, ends=(699,))
        outputs.append(np.concatenate([of_prompt, decode(attention, qkv, 699)], axis=1))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])


@pytest.mark.parametrize("case", [case for case in POLICIES if case is not DENSE], ids=str)
def test_rules_are_refused(case: PolicyCase) -> None:
    with pytest.raises(ValueError, match=r"by distance \(ALiBi\) reads everything, not by a rule"):
        make_attention(
            case.make_policy(), Shape(), chunk_size=48, max_context=200, max_alibi_bias=BIAS
        )

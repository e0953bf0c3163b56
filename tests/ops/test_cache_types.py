"""A cache computes with what its type stores, exactly; what the types cost in accuracy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.config import CACHE_TYPES
from tests.ops.attention_case import Qkv, Shape, decode, make_attention, prefill
from tests.reference.cached_rows import stored
from tests.reference.dense import causal_attention
from tests.reference.qkv import random_qkv

S = 64
N_TOKENS = 5 * S + 21
SHAPE = Shape(n_kv_heads=2, group=3, head_dim=64)
MakePolicy = Callable[[], _core.SparsePolicy]

pytestmark = pytest.mark.usefixtures("isa")


class LandmarkRule:
    """Reads the keys and values: remembers them, keeps 20 positions and the mean of the others."""

    def __init__(self) -> None:
        self.past_keys: dict[int, np.ndarray] = {}

    def select_memory(self, layer, kv_head, chunk, queries, past_keys, past_values):  # type: ignore[no-untyped-def]
        self.past_keys[kv_head] = past_keys
        positions = np.arange(0, min(20, chunk[0]), dtype=np.int32)
        keys, values = (rows[len(positions) :] for rows in (past_keys, past_values))
        if not len(keys):
            return positions
        means = (rows.astype(np.float32).mean(axis=0)[None] for rows in (keys, values))
        return positions, *means, np.array([np.log(len(keys))], np.float32)


POLICIES: dict[str, MakePolicy] = {
    "dense": _core.dense_policy,
    "h2o": lambda: _core.h2o_policy(16, 24),
    "h2o by values": lambda: _core.h2o_policy(16, 24, by_values=True),
    "headwise": lambda: _core.headwise_policy([12, 40], local=4, sinks=2, page_size=16),
    "python": lambda: _core.python_policy(LandmarkRule(), max_synthetic=1),
}


def rounded(qkv: Qkv, cache_type: str) -> Qkv:
    q, k, v = qkv
    k_type, v_type = cache_type.split("/")[0], cache_type.split("/")[-1]
    return q, stored(k.astype(np.float32), k_type), stored(v.astype(np.float32), v_type)


def compute(qkv: Qkv, cache_type: str, policy: str = "dense") -> tuple[np.ndarray, np.ndarray]:
    """Outputs of a prompt, and of the token decoded after it."""
    attention = make_attention(
        POLICIES[policy](),
        SHAPE,
        chunk_size=S,
        batch_size=3 * S,
        max_context=N_TOKENS,
        cache_type=cache_type,
    )
    output = prefill(attention, qkv, ends=(3 * S, N_TOKENS - 1))
    return output, decode(attention, qkv, N_TOKENS - 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "f16/q8_0", "q8_0/f16"])
def test_equals_a_float_cache_of_the_stored_values_exactly(cache_type: str, policy: str) -> None:
    """Stored values are exact in float32, so that a float cache of them computes the same, but for
    what decode rounds when it multiplies q8_0 as integers."""
    qkv = random_qkv(1, n_tokens=N_TOKENS, **SHAPE.heads)
    prompt, last = compute(qkv, cache_type, policy)
    expected_prompt, expected_last = compute(rounded(qkv, cache_type), "f32", policy)
    np.testing.assert_array_equal(prompt, expected_prompt)
    if "q8_0" not in cache_type:
        np.testing.assert_array_equal(last, expected_last)


# Integers of 16 bits: half a unit of the largest, of which there are 32,639.
HALF_UNIT = 0.5 / 32639


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cache_type", ["q8_0", "f16/q8_0", "q8_0/f16"])
def test_what_decode_rounds(cache_type: str, seed: int) -> None:
    """The bound that kernels/attention_blocks-inl.h states, and what is left of it in truth: a
    twelfth of what the cache itself rounds away."""
    qkv = random_qkv(seed, n_tokens=N_TOKENS, **SHAPE.heads)
    inputs = rounded(qkv, cache_type)
    q, k, v = (array[:, -1:] if i == 0 else array for i, array in enumerate(inputs))
    _, last = compute(qkv, cache_type)
    expected, of_exact_rows = causal_attention(q, k, v), causal_attention(q, *qkv[1:])
    logit_error = weight_error = 0.0
    if cache_type.startswith("q8_0"):
        # |q| <= max|q| of a head, |k| summed over a head's dimensions; scale 1 / 8.
        logit_error = HALF_UNIT * np.abs(q).max() * np.abs(k).sum(axis=-1).max() / 8.0
    if cache_type.endswith("q8_0"):
        weight_error = HALF_UNIT * np.abs(v).max() * N_TOKENS
    bound = (np.expm1(2 * logit_error) * np.abs(v).max() + weight_error) * 1.01 + 1e-5
    errors = np.abs(last - expected)
    assert errors.max() <= bound
    rounded_away = np.sqrt(np.mean((expected - of_exact_rows) ** 2))
    assert np.sqrt(np.mean(errors**2)) < rounded_away / 12


# Largest error of outputs whose values are of size 1, where logits have standard deviation 2:
# measured 2.4e-6, 2.0e-3 and 3.7e-2. A quant is off by up to max|x| / 254, about 1 percent of a
# typical value, a half by up to 0.05 percent.
LARGEST_ERRORS = {"f32": 2e-5, "f16": 4e-3, "q8_0": 7e-2}


def test_every_type_has_a_bound() -> None:
    assert set(LARGEST_ERRORS) == set(CACHE_TYPES)


@pytest.mark.parametrize("seed", range(3))
def test_error_of_each_type(seed: int) -> None:
    qkv = random_qkv(seed, n_tokens=N_TOKENS, **SHAPE.heads)
    expected = causal_attention(*qkv)
    errors = {}
    for cache_type in ("f32", "f16", "q8_0"):
        attention = make_attention(
            _core.dense_policy(), SHAPE, chunk_size=S, max_context=N_TOKENS, cache_type=cache_type
        )
        output = prefill(attention, qkv, ends=(N_TOKENS - 1,))
        last = decode(attention, qkv, N_TOKENS - 1)
        difference = np.abs(np.concatenate([output, last], axis=1) - expected)
        assert difference.max() < LARGEST_ERRORS[cache_type]
        errors[cache_type] = float(np.sqrt(np.mean(difference**2)))
    assert 20 * errors["f32"] < errors["f16"]
    assert 5 * errors["f16"] < errors["q8_0"]


def test_rules_in_python_see_the_stored_values() -> None:
    rule = LandmarkRule()
    q, k, v = random_qkv(2, n_tokens=2 * S, **SHAPE.heads)
    attention = make_attention(
        _core.python_policy(rule, max_synthetic=1),
        SHAPE,
        chunk_size=S,
        max_context=2 * S,
        cache_type="q8_0",
    )
    prefill(attention, (q, k, v))
    expected = stored(k.astype(np.float32), "q8_0")[:, :S]
    for kv_head, past_keys in rule.past_keys.items():
        assert past_keys.dtype == np.float32
        np.testing.assert_array_equal(past_keys, expected[kv_head])

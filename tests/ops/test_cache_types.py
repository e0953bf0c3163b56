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
    return q, stored(k.astype(np.float32), cache_type), stored(v.astype(np.float32), cache_type)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_equals_a_float_cache_of_the_stored_values_exactly(cache_type: str, policy: str) -> None:
    """Stored values are exact in float32, so that a float cache of them computes the same."""
    qkv = random_qkv(1, n_tokens=N_TOKENS, **SHAPE.heads)
    results = []
    for type_of_cache, inputs in ((cache_type, qkv), ("f32", rounded(qkv, cache_type))):
        attention = make_attention(
            POLICIES[policy](),
            SHAPE,
            chunk_size=S,
            batch_size=3 * S,
            max_context=N_TOKENS,
            cache_type=type_of_cache,
        )
        output = prefill(attention, inputs, ends=(3 * S, N_TOKENS - 1))
        results.append((output, decode(attention, inputs, N_TOKENS - 1)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


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

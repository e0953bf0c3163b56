"""The C++ decoder against the float64 reference decoder, on tiny models of every type.

Two comparisons. With the two roundings that the core makes by design, activations to 8 bits
and keys and values to float16, put into the reference, what is left is float32 arithmetic
and a few values that fall to the other side of a rounding boundary: EMULATED_TOLERANCE.
Against the exact reference the error must be no larger than what those roundings cause in
exact arithmetic (their error in the reference itself), with a margin for chance.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from tests.model.model_pair import (
    CHUNK_SIZE,
    ModelPair,
    decisive_prompt,
    layers_of,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
)
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import FLOAT_TYPES, TENSOR_TYPES

EMULATED_TOLERANCE = 5e-3
CHANCE_MARGIN = 1.3
LENGTHS = [
    1,
    CHUNK_SIZE - 1,
    CHUNK_SIZE,
    CHUNK_SIZE + 1,
    2 * CHUNK_SIZE - 1,
    2 * CHUNK_SIZE,
    2 * CHUNK_SIZE + 128,
    3 * CHUNK_SIZE + 17,
]
VARIANTS = [
    {"biases": True, "tied": False},
    {"rotary_dim": 16, "rope_scaling": "linear"},
    {"rope_scaling": "llama3", "context_length": 512},
    {"n_heads": 4, "n_kv_heads": 4, "head_dim": 64},
    {"n_heads": 9, "n_kv_heads": 3, "model_dim": 288, "head_dim": 32, "ffn_dim": 320},
    {"tensor_type": "Q4_1", "embedding_type": "Q8_0"},
]


def check_against_reference(pair: ModelPair, attention: str, tokens: np.ndarray) -> None:
    make_layer, policy = layers_of(attention)
    logits = prefill(pair.session(policy), tokens)
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    emulated = pair.as_computed(make_layer).prefill(tokens)
    assert relative_error(logits, emulated) < EMULATED_TOLERANCE
    exact = pair.reference.start(make_layer).prefill(tokens)
    allowed = CHANCE_MARGIN * relative_error(emulated, exact) + EMULATED_TOLERANCE
    assert relative_error(logits, exact) < allowed


def test_every_type_of_the_core_is_tested() -> None:
    assert set(_core.supported_types()) == set(TENSOR_TYPES)


@pytest.mark.parametrize("attention", ["dense", "h2o"])
@pytest.mark.parametrize("tensor_type", TENSOR_TYPES)
def test_every_tensor_type(tiny_model: TinyModelFactory, tensor_type: str, attention: str) -> None:
    pair = load_pair(tiny_model, tensor_type=tensor_type)
    check_against_reference(pair, attention, decisive_prompt(pair, 2 * CHUNK_SIZE + 40))


@pytest.mark.parametrize("attention", ["dense", "h2o"])
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_prompt_lengths(tiny_model: TinyModelFactory, n_tokens: int, attention: str) -> None:
    pair = load_pair(tiny_model, tensor_type="Q8_0")
    check_against_reference(pair, attention, decisive_prompt(pair, n_tokens))


@pytest.mark.parametrize("attention", ["dense", "h2o"])
@pytest.mark.parametrize("options", VARIANTS)
def test_shapes_and_options_of_the_architecture(
    tiny_model: TinyModelFactory, options: dict[str, object], attention: str
) -> None:
    pair = load_pair(tiny_model, **options)
    check_against_reference(pair, attention, decisive_prompt(pair, 2 * CHUNK_SIZE + 9))


@pytest.mark.parametrize("tensor_type", FLOAT_TYPES)
def test_float_weights_with_a_float_cache_round_nothing(
    tiny_model: TinyModelFactory, tensor_type: str
) -> None:
    pair = load_pair(tiny_model, tensor_type=tensor_type)
    tokens = random_tokens(150)
    make_layer, policy = layers_of("dense")
    logits = prefill(pair.session(policy, cache_type="f32"), tokens)
    expected = pair.reference.start(make_layer).prefill(tokens)
    assert relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize("attention", ["dense", "h2o"])
@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0"])
def test_decode_after_prefill(
    tiny_model: TinyModelFactory, tensor_type: str, attention: str
) -> None:
    pair = load_pair(tiny_model, tensor_type=tensor_type)
    tokens = decisive_prompt(pair, 2 * CHUNK_SIZE + 9)
    make_layer, policy = layers_of(attention)
    session, run = pair.session(policy), pair.as_computed(make_layer)
    prefill(session, tokens)
    run.prefill(tokens)
    for step, token in enumerate(random_tokens(20, seed=99)):
        logits = session.decode(int(token))
        assert relative_error(logits, run.decode(int(token))) < 2 * EMULATED_TOLERANCE, step
    assert session.position == len(tokens) + 20

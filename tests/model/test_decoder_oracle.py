"""The C++ decoder against the float64 reference decoder, on tiny models of every type.

The core rounds by design: activations to 8 bits, keys and values to float16. The error against the
exact reference must be the error that these roundings cause in exact arithmetic, with a margin
for chance. With the same roundings put into the reference, the two still differ, because a last
bit of float32 moves some values over a rounding boundary and every layer multiplies them
(measured: half of the rounding error), but they must be closer to each other than to the exact
result.
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
from tools.tiny_models.model import FLOAT_TYPES, TENSOR_TYPES

FLOAT_TOLERANCE = 1e-4
EMULATED_SHARE = 0.8
CHANCE_MARGIN = 1.15
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
    make_layer, make_policy = layers_of(attention)
    logits = prefill(pair.session(make_policy()), tokens)
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    emulated = pair.as_computed(make_layer).prefill(tokens)
    exact = pair.reference.start(make_layer).prefill(tokens)
    rounding_error = relative_error(emulated, exact)
    assert relative_error(logits, emulated) < EMULATED_SHARE * rounding_error + FLOAT_TOLERANCE
    assert relative_error(logits, exact) < CHANCE_MARGIN * rounding_error + FLOAT_TOLERANCE


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
    make_layer, make_policy = layers_of("dense")
    logits = prefill(pair.session(make_policy(), cache_type="f32"), tokens)
    expected = pair.reference.start(make_layer).prefill(tokens)
    assert relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize("attention", ["dense", "h2o"])
@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0"])
def test_decode_after_prefill(
    tiny_model: TinyModelFactory, tensor_type: str, attention: str
) -> None:
    pair = load_pair(tiny_model, tensor_type=tensor_type)
    tokens = decisive_prompt(pair, 2 * CHUNK_SIZE + 9)
    make_layer, make_policy = layers_of(attention)
    session, exact = pair.session(make_policy()), pair.reference.start(make_layer)
    emulated = pair.as_computed(make_layer)
    prefill(session, tokens)
    exact.prefill(tokens)
    emulated.prefill(tokens)
    rows = [
        (session.decode(token), emulated.decode(token), exact.decode(token))
        for token in random_tokens(20, seed=99).tolist()
    ]
    logits, emulated_logits, exact_logits = (np.stack(part) for part in zip(*rows, strict=True))
    rounding_error = relative_error(emulated_logits, exact_logits)
    allowed = EMULATED_SHARE * rounding_error + FLOAT_TOLERANCE
    assert relative_error(logits, emulated_logits) < allowed
    assert session.position == len(tokens) + 20

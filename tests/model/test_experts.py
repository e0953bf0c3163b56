"""Mixture of experts: types of the weights, blocks of rows, threads, and decoding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgeh2o import _core
from tests.model.model_pair import (
    CHUNK_SIZE,
    layers_of,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
)
from tests.tiny_models import TinyModelFactory

MODEL = {"architecture": "qwen3moe", "n_layers": 2}
N_TOKENS = 2 * CHUNK_SIZE + 17


@pytest.fixture
def restored_threads() -> Iterator[None]:
    n_threads = _core.num_threads()
    yield
    _core.set_num_threads(n_threads)


def median_error(logits: np.ndarray, expected: np.ndarray) -> float:
    """The median over rows of ``relative_error``."""
    errors = [relative_error(row, other) for row, other in zip(logits, expected, strict=True)]
    return float(np.median(errors))


@pytest.mark.parametrize("tensor_type", ["F32", "F16", "Q4_0", "Q4_K", "Q8_0", "IQ4_XS"])
def test_logits_of_every_kind_of_weights(tiny_model: TinyModelFactory, tensor_type: str) -> None:
    pair = load_pair(tiny_model, **MODEL, tensor_type=tensor_type)
    tokens = random_tokens(N_TOKENS)
    make_layer, make_policy = layers_of("dense")
    emulated = pair.as_computed(make_layer).prefill(tokens)
    exact = pair.reference.start(make_layer).prefill(tokens)
    actual = prefill(pair.session(make_policy()), tokens)
    # Medians of rows: where the choice of an expert is a near tie, rounding may turn it.
    assert median_error(actual, emulated) < 0.8 * median_error(emulated, exact) + 1e-4
    assert median_error(actual, exact) < 1.15 * median_error(emulated, exact) + 1e-4


def test_a_token_goes_the_same_way_alone(tiny_model: TinyModelFactory) -> None:
    pair = load_pair(tiny_model, **MODEL)
    tokens = random_tokens(N_TOKENS)
    session = pair.session(_core.dense_policy(), cache_type="f32")
    expected = prefill(session, tokens)[-5:]
    session.reset()
    session.prefill(tokens[:-5], is_last=True)
    decoded = np.stack([session.decode(int(token)) for token in tokens[-5:]])
    assert relative_error(decoded, expected) < 1e-5


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_K"])
def test_threads_do_not_change_a_bit(
    tiny_model: TinyModelFactory, tensor_type: str, restored_threads: None
) -> None:
    pair = load_pair(tiny_model, **MODEL, tensor_type=tensor_type)
    tokens = random_tokens(N_TOKENS)
    logits = []
    for n_threads in (1, 2, 3):
        _core.set_num_threads(n_threads)
        logits.append(prefill(pair.session(_core.dense_policy()), tokens))
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])


def test_experts_used_must_be_among_the_experts() -> None:
    heads = {"n_heads": 1, "n_kv_heads": 1, "key_dim": 8, "value_dim": 8, "attention_scale": 1.0}
    for n_experts, n_used in ((4, 0), (4, 5), (0, 1)):
        experts = {"n_experts": n_experts, "n_experts_used": n_used}
        layer = {**heads, "ffn_dim": 8, "ffn": "experts", **experts}
        with pytest.raises(ValueError, match="n_experts_used"):
            _core.DecoderConfig(
                model_dim=8,
                vocab_size=8,
                norm_eps=1e-5,
                ropes=[{"inv_freq": [1.0]}],
                layers=[layer],
            )

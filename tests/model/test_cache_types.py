"""What each type of the key-value cache costs in the logits of a model, in numbers."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o.config import CACHE_TYPES
from tests.model.model_pair import (
    CHUNK_SIZE,
    Logits,
    ModelPair,
    layers_of,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
)
from tests.reference.decoder import DecoderRun
from tests.tiny_models import TinyModelFactory

N_PROMPT, N_DECODED = 2 * CHUNK_SIZE + 40, 20
# Relative error of the logits of the two-layer model with float weights, which round nothing else:
# measured 1.4e-6, 5.8e-4 and 1.3e-2.
BOUNDS = {"f32": 1e-5, "f16": 1e-3, "q8_0": 2.5e-2}
# A last bit of float32 moves some values over a rounding boundary.
EMULATED_SHARE = 0.2


@pytest.fixture(scope="module")
def pair(tiny_model: TinyModelFactory) -> ModelPair:
    return load_pair(tiny_model, tensor_type="F32")


def _run(pair: ModelPair, cache_type: str) -> tuple[Logits, Logits]:
    """Logits of the prompt, and of tokens decoded after it."""
    session = pair.session(layers_of("dense")[1](), cache_type=cache_type)
    prompt = prefill(session, random_tokens(N_PROMPT))
    decoded = [session.decode(token) for token in random_tokens(N_DECODED, seed=99).tolist()]
    return prompt, np.stack(decoded)


def _reference(run: DecoderRun) -> tuple[np.ndarray, np.ndarray]:
    prompt = run.prefill(random_tokens(N_PROMPT))
    decoded = [run.decode(token) for token in random_tokens(N_DECODED, seed=99).tolist()]
    return prompt, np.stack(decoded)


def test_error_of_each_type(pair: ModelPair) -> None:
    assert set(BOUNDS) == set(CACHE_TYPES)
    make_layer, _ = layers_of("dense")
    exact = _reference(pair.reference.start(make_layer))
    errors = {}
    for cache_type, bound in BOUNDS.items():
        emulated = _reference(pair.reference.start(make_layer, cache_type=cache_type))
        computed = _run(pair, cache_type)
        errors[cache_type] = [relative_error(*both) for both in zip(computed, exact, strict=True)]
        assert max(errors[cache_type]) < bound
        for logits, like_core, without in zip(computed, emulated, exact, strict=True):
            allowed = EMULATED_SHARE * relative_error(like_core, without) + BOUNDS["f32"]
            assert relative_error(logits, like_core) < allowed
    for stage in (0, 1):
        f32, f16, q8_0 = (errors[name][stage] for name in ("f32", "f16", "q8_0"))
        assert 10 * f32 < f16 and 5 * f16 < q8_0

"""Inputs that layers have of their own per token: in every kind of weights, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.errors import FormatError
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import (
    CHUNK_SIZE,
    layers_of,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
)
from tests.tiny_models import TinyModelFactory

MODEL: dict[str, object] = {
    "architecture": "gemma4",
    "n_layers": 2,
    "sliding_window": 24,
    "head_dim": 64,
    "head_dim_sliding": 32,
    "sliding_window_pattern": 2,
}


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q4_0", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS"])
@pytest.mark.parametrize("architecture", ["gemma3n", "gemma4"])
def test_logits_of_every_kind_of_weights(
    tiny_model: TinyModelFactory, tensor_type: str, architecture: str
) -> None:
    options = {
        **MODEL,
        "architecture": architecture,
        "head_dim": 32 * (1 + (architecture == "gemma4")),
    }
    pair = load_pair(tiny_model, **options, token_input_dim=256, tensor_type=tensor_type)
    tokens = random_tokens(2 * CHUNK_SIZE + 17)
    make_layer, make_policy = layers_of("dense")
    emulated = pair.as_computed(make_layer).prefill(tokens)
    exact = pair.reference.start(make_layer).prefill(tokens)
    actual = prefill(pair.session(make_policy()), tokens)
    assert relative_error(actual, exact) < 1.15 * relative_error(emulated, exact) + 1e-4


def test_inputs_that_fit_no_block_are_refused(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**MODEL, token_input_dim=32, tensor_type="Q8_0")
    with (
        NativeModelFile(path) as file,
        pytest.raises(FormatError, match=r"inputs per token of 32 numbers.*multiples of 256"),
    ):
        file.load()


@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0"])
def test_the_table_is_loaded_in_parts(
    tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch, tensor_type: str
) -> None:
    path = tiny_model(**MODEL, token_input_dim=256, tensor_type=tensor_type)
    tokens = random_tokens(90)
    logits = []
    for n_rows, n_parts in ((16384, 1), (100, 4), (320, 1), (319, 2)):
        monkeypatch.setattr("edgeh2o.models.hyperparameters.TOKEN_INPUT_ROWS", n_rows)
        with NativeModelFile(path) as file:
            core = file.load()._core_model
        with pytest.raises(ValueError, match="not part of this model"):
            core.dequantize(f"per_layer_token_embd.{n_parts}.weight")
        session = _core.Sequence(
            core, _core.dense_policy(), max_context=128, batch_size=128, chunk_size=64
        )
        logits.append(session.prefill(tokens, is_last=True))
    for others in logits[1:]:
        np.testing.assert_array_equal(others, logits[0])

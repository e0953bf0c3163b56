"""Models whose tokens read those behind them too, against the float64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM, _core
from edgeh2o.runners.core_config import core_config
from edgeh2o.runners.native import NativeModel, NativeModelFile
from tests.embedding_cases import ENCODER_CASES, options_of
from tests.model.model_pair import random_tokens, relative_error
from tests.reference.encoder import ReferenceEncoder
from tests.tiny_architectures import ENCODERS
from tests.tiny_models import TinyModelFactory

MOST = 400
# Errors of activations rounded to 8 bits, of matrices of as many.
ROUNDED = 0.05


def load(path: Path) -> NativeModel:
    with NativeModelFile(path) as file:
        return file.load()


def start(model: NativeModel, **options: Any) -> _core.Sequence:
    sizes = {"max_context": MOST, "batch_size": MOST, "chunk_size": MOST, "cache_type": "f32"}
    return _core.Sequence(model._core_model, _core.dense_policy(), **{**sizes, **options})


def test_every_encoder_has_a_case() -> None:
    architectures = {options_of(case)["architecture"] for case in ENCODER_CASES}
    assert architectures == set(ENCODERS)


@pytest.mark.parametrize("case", ENCODER_CASES)
@pytest.mark.parametrize("isa", _core.available_isas())
def test_rows_are_those_of_the_reference(tiny_model: TinyModelFactory, case: str, isa: str) -> None:
    """Texts of all lengths in one sequence, one after another."""
    _core.use_isa(isa)
    path = tiny_model(**options_of(case))
    model, reference = load(path), ReferenceEncoder(path)
    session = start(model)
    for n_tokens in (1, 2, 64, 129, MOST, 17):
        tokens = random_tokens(n_tokens, seed=n_tokens)
        session.reset()
        rows = session.embed(tokens, is_last=True, n_rows=n_tokens)
        assert rows.shape == (n_tokens, model.config.model_dim)
        assert relative_error(rows, reference.rows(tokens)) < 2e-5
        session.reset()
        last = session.embed(tokens, is_last=True, n_rows=1)
        np.testing.assert_allclose(last[0], rows[-1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", ENCODERS)
@pytest.mark.parametrize("tensor_type", ["F16", "Q8_0"])
def test_narrow_weights(tiny_model: TinyModelFactory, architecture: str, tensor_type: str) -> None:
    """Files of the usual types, whose activations are rounded as anywhere."""
    path = tiny_model(architecture=architecture, n_layers=3, tensor_type=tensor_type)
    model, tokens = load(path), random_tokens(150)
    session = start(model, cache_type="f16")
    rows = session.embed(tokens, is_last=True, n_rows=len(tokens))
    error = relative_error(rows, ReferenceEncoder(path).rows(tokens))
    assert error < (ROUNDED if tensor_type == "Q8_0" else 1e-3)


def test_a_token_counts_for_those_before_it(tiny_model: TinyModelFactory) -> None:
    model = load(tiny_model(**options_of("llama-embed")))
    session, tokens = start(model), random_tokens(60)
    before = session.embed(tokens, is_last=True, n_rows=60)
    session.reset()
    changed = tokens.copy()
    changed[-1] += 1
    after = session.embed(changed, is_last=True, n_rows=60)
    assert np.abs(after[0] - before[0]).max() > 1e-4


@pytest.mark.parametrize("architecture", ENCODERS)
def test_threads_change_nothing(tiny_model: TinyModelFactory, architecture: str) -> None:
    model = load(tiny_model(architecture=architecture, n_layers=2))
    tokens = random_tokens(300)
    found = [start(model, threads=n).embed(tokens, is_last=True, n_rows=300) for n in (1, 2, 3)]
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_memory_has_the_rows_of_one_layer(tiny_model: TinyModelFactory) -> None:
    sizes = {"max_context": 256, "batch_size": 256, "chunk_size": 256}
    bytes_of = [
        _core.Sequence.estimate_bytes(
            core_config(load(tiny_model(architecture="llama-embed", n_layers=n)).config),
            _core.dense_policy(),
            **sizes,
        )["kv_cache"]
        for n in (1, 5)
    ]
    assert bytes_of[0] == bytes_of[1] == 2 * 256 * 2 * 32 * 2


def test_other_calls_are_refused(tiny_model: TinyModelFactory) -> None:
    model = load(tiny_model(architecture="gemma-embedding", n_layers=2))
    session, tokens = start(model), random_tokens(20)
    message = "a text is read whole, in one call, and nothing is written behind it"
    with pytest.raises(ValueError, match=message):
        session.embed(tokens, is_last=False, n_rows=20)
    with pytest.raises(ValueError, match=message):
        session.prefill(tokens, is_last=True, stays_open=True)
    with pytest.raises(ValueError, match=message):
        session.decode(5)
    session.embed(tokens, is_last=True, n_rows=1)
    with pytest.raises(ValueError, match=message):
        session.embed(tokens, is_last=True, n_rows=1)
    with pytest.raises(ValueError, match=message):
        session.decode(5)
    with pytest.raises(ValueError, match="not causal reads everything, not by a rule"):
        _core.Sequence(
            model._core_model, _core.h2o_policy(12, 4), max_context=64, batch_size=64, chunk_size=64
        )


@pytest.mark.parametrize("case", ENCODER_CASES)
def test_vectors_are_those_of_the_reference(tiny_model: TinyModelFactory, case: str) -> None:
    """Behind the pooling, and what else the file has there."""
    path = tiny_model(**options_of(case))
    tokens = random_tokens(100).tolist()
    reference = ReferenceEncoder(path)
    with LLM(path, cache_type="f32", attention_precision="f32") as llm:
        for pooling in ("none", "mean", "cls", "last"):
            found = llm.embed(tokens, pooling, normalize=False)
            expected = reference.vector(tokens, pooling)
            assert found.shape == expected.shape and found.dtype == np.float32
            assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "cause"),
    [
        ("gemma-embedding", "attention that is not causal does not run on a GPU yet"),
        ("llama-embed", "attention that is not causal does not run on a GPU yet"),
        ("bert", "LayerNorm does not run on a GPU yet"),
        ("refact", r"attention with a bias by distance \(ALiBi\) does not run on a GPU yet"),
    ],
)
def test_gpus_refuse_them(tiny_model: TinyModelFactory, architecture: str, cause: str) -> None:
    config = load(tiny_model(architecture=architecture, n_layers=1)).config
    with pytest.raises(ValueError, match=f"{cause}; use --device cpu"):
        _core.check_device_supports(core_config(config))

"""Every architecture against llama.cpp's recorded log-probabilities (tools/update_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.models import registered_architectures
from edgeh2o.runners.native import NativeModelFile
from tests.model.golden_cases import CASES, CONTEXT, options_of
from tests.model.goldens import FOLDER, log_softmax, tolerance_of
from tests.tiny_architectures import ENCODERS
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.model import TinyModel

MAX_KL = 1e-5  # nats


def make_session(path: Path, chunk_size: int) -> _core.Sequence:
    with NativeModelFile(path) as model_file:
        model = model_file.load()._core_model
    return _core.Sequence(
        model,
        _core.dense_policy(),
        max_context=CONTEXT,
        batch_size=3 * chunk_size,
        chunk_size=chunk_size,
        cache_type="f32",
        all_rows=True,
    )


def test_every_architecture_has_a_golden() -> None:
    architectures = {TinyModel(**options_of(case)).architecture for case in CASES}
    assert architectures == set(registered_architectures()) - set(ENCODERS)  # which have vectors
    assert {path.stem for path in FOLDER.glob("*.npz")} == set(CASES)
    assert set(json.loads((FOLDER / "versions.json").read_text())) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_those_of_llama_cpp(tiny_model: TinyModelFactory, case: str) -> None:
    with np.load(FOLDER / f"{case}.npz") as golden:
        tokens, positions = golden["tokens"], golden["positions"]
        expected = golden["log_probabilities"]
    assert len(tokens) == CONTEXT and positions.max() > 0.9 * CONTEXT
    session = make_session(tiny_model(**options_of(case)), chunk_size=32)
    rows = []
    for first in range(0, CONTEXT, 96):
        batch = tokens[first : first + 96]
        session.prefill(batch, is_last=first + 96 >= CONTEXT)
        rows.append(session.row_logits(0, len(batch)))
    actual = log_softmax(np.concatenate(rows)[positions])
    # What lies 16 nats below the best token is not saved.
    is_saved = expected > expected.min(axis=-1, keepdims=True)
    assert is_saved.mean() > 0.9
    np.testing.assert_allclose(actual[is_saved], expected[is_saved], atol=tolerance_of(case))
    terms = np.where(is_saved, np.exp(expected) * (expected - actual), 0.0)
    assert abs(terms.sum(axis=-1).mean()) < MAX_KL


@pytest.mark.parametrize("case", CASES)
def test_decode_continues_prefill(tiny_model: TinyModelFactory, case: str) -> None:
    with np.load(FOLDER / f"{case}.npz") as golden:
        tokens = golden["tokens"]
    session = make_session(tiny_model(**options_of(case)), chunk_size=48)
    session.prefill(tokens, is_last=True)
    expected = session.row_logits(CONTEXT - 12, 12)
    session.reset()
    session.prefill(tokens[:-12], is_last=True)
    actual = np.stack([session.decode(int(token)) for token in tokens[-12:]])
    np.testing.assert_allclose(actual, expected, atol=2e-4)

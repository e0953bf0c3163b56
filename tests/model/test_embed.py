"""Hidden rows of prompt tokens, which texts are embedded by: what their logits are made of."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.runners.native import NativeModel, NativeModelFile
from tests.model.golden_cases import CASES, CONTEXT, options_of
from tests.model.goldens import FOLDER, log_softmax, tolerance_of
from tests.model.model_pair import CHUNK_SIZE, ModelPair, load_pair, random_tokens
from tests.tiny_models import TinyModelFactory

N_TOKENS = 2 * CHUNK_SIZE + 21
SIZES = {"max_context": 256, "batch_size": 2 * CHUNK_SIZE, "chunk_size": CHUNK_SIZE}


def embed(session: _core.Sequence, tokens: np.ndarray, end: int = 2 * CHUNK_SIZE) -> np.ndarray:
    """All rows of a prompt that is read in two calls."""
    session.reset()
    first = session.embed(tokens[:end], is_last=False, n_rows=end)
    rest = session.embed(tokens[end:], is_last=True, n_rows=len(tokens) - end)
    assert session.prompt_logits is None and session.position == len(tokens)
    return np.concatenate([first, rest])


def logits_of(rows: np.ndarray, path: Path, model: NativeModel) -> np.ndarray:
    """What the model makes of hidden rows, in float64."""
    config = model.config
    name = "token_embd.weight" if config.tied_embeddings else "output.weight"
    logits = rows.astype(np.float64) @ model.dequantize(name).T
    if config.has_output_bias:
        biases = [t.data for t in gguf.GGUFReader(path).tensors if t.name == "output.bias"]
        logits += biases[0]
    logits *= config.logit_scale
    cap = config.logit_soft_cap
    return cap * np.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("case", CASES)
def test_rows_are_what_logits_are_made_of(tiny_model: TinyModelFactory, case: str) -> None:
    """Of every architecture, in two calls: logits of them are those that llama.cpp has."""
    with np.load(FOLDER / f"{case}.npz") as golden:
        tokens, positions = golden["tokens"], golden["positions"]
        expected = golden["log_probabilities"]
    path = tiny_model(**options_of(case))
    with NativeModelFile(path) as file:
        model = file.load()
    sizes = {"max_context": CONTEXT, "batch_size": 96, "chunk_size": 32}
    session = _core.Sequence(model._core_model, _core.dense_policy(), cache_type="f32", **sizes)
    rows = embed(session, tokens, 96)
    assert rows.dtype == np.float32 and rows.shape == (CONTEXT, model.config.model_dim)
    logits = logits_of(rows[positions], path, model)
    actual = log_softmax(logits)
    is_saved = expected > expected.min(axis=-1, keepdims=True)
    np.testing.assert_allclose(actual[is_saved], expected[is_saved], atol=tolerance_of(case))
    session.reset()
    session.embed(tokens[:96], is_last=False, n_rows=0)
    last = session.embed(tokens[96:], is_last=True, n_rows=1)
    np.testing.assert_allclose(last[0], rows[-1], rtol=1e-3, atol=1e-4 * np.abs(rows).max())


POLICIES = {
    "dense": _core.dense_policy,
    "h2o": lambda: _core.h2o_policy(12, 4),
    "headwise": lambda: _core.headwise_policy([None, 8, 16, 40], local=4, page_size=16, tail=8),
}


@pytest.fixture
def pair(tiny_model: TinyModelFactory) -> ModelPair:
    return load_pair(tiny_model, tensor_type="Q4_0")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_row_is_that_of_the_answer(pair: ModelPair, policy: str) -> None:
    """Bit by bit, however many rows are wanted beside it; and generated tokens follow as ever."""
    tokens = random_tokens(N_TOKENS)
    session = pair.session(POLICIES[policy](), batch_size=2 * CHUNK_SIZE, all_rows=False)
    session.keeps_hidden = True
    session.prefill(tokens[: 2 * CHUNK_SIZE], is_last=False)
    session.prefill(tokens[2 * CHUNK_SIZE :], is_last=True)
    answer = session.hidden[-1]
    following = session.decode(5)
    session.keeps_hidden = False
    for n_rows in (1, 2, N_TOKENS - 2 * CHUNK_SIZE):
        session.reset()
        session.embed(tokens[: 2 * CHUNK_SIZE], is_last=False, n_rows=n_rows - 1)
        rows = session.embed(tokens[2 * CHUNK_SIZE :], is_last=True, n_rows=n_rows)
        assert rows.shape == (n_rows, len(answer))
        np.testing.assert_array_equal(rows[-1], answer)
        np.testing.assert_array_equal(session.decode(5), following)


def test_rows_do_not_depend_on_the_number_of_threads(pair: ModelPair) -> None:
    tokens = random_tokens(N_TOKENS)
    sizes = {**SIZES, "max_context": 640}
    found = [
        embed(_core.Sequence(pair.core, _core.dense_policy(), threads=n, **sizes), tokens)
        for n in (1, 2, 3)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_more_rows_than_tokens_are_refused(pair: ModelPair) -> None:
    session = pair.session(_core.dense_policy())
    with pytest.raises(ValueError, match="a call of 3 tokens has no 4 rows"):
        session.embed(random_tokens(3), is_last=True, n_rows=4)
    assert session.position == 0

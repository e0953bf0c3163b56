"""A layer that guesses tokens ahead (MTP), against float64, and what it leaves of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core, _kernels
from edgeh2o.models import drafting
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import CHUNK_SIZE, random_tokens, relative_error
from tests.reference.decoder import ReferenceDecoder
from tests.reference.dense import DenseLayer
from tests.reference.drafting import drafting_decoder, start_drafting
from tests.tiny_models import TinyModelFactory

OPTIONS: dict[str, dict[str, object]] = {
    "qwen35": {"n_layers": 4},
    "qwen35moe": {"n_layers": 2, "tied": False},
    # Behind a dense layer, with experts whose shares are sigmoids.
    "glm4moe": {"n_layers": 2, "rotary_dim": 16, "n_shared_experts": 1},
    "hy_v3": {"n_layers": 2},
    "bailingmoe2": {"n_layers": 2, "n_shared_experts": 2},
    # With a window and one network, as the first layer.
    "exaone-moe": {"n_layers": 3, "sliding_window": 20, "shared_ffn_dim": 80},
    "deepseek2": {"n_layers": 2, "q_rank": 64, "kv_rank": 64, "nope_dim": 32, "value_dim": 32},
}
# Rounding chooses other experts now and then.
CASES = [*((name, "F32") for name in OPTIONS), *((name, "Q8_0") for name in list(OPTIONS)[:3])]
SIZES = {"max_context": 256, "batch_size": 128, "chunk_size": CHUNK_SIZE}
N_TOKENS, N_GUESSES = 90, 4
FLOAT_TOLERANCE, CHANCE_MARGIN = 2e-4, 1.3


@pytest.fixture(params=_core.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _core.active_isa()
    _core.use_isa(request.param)
    yield request.param
    _core.use_isa(before)


@dataclass(frozen=True)
class Pair:
    """A model and its layer in the core, and both in the reference."""

    main: _core.Model
    layer: _core.Model
    reference: ReferenceDecoder

    def session(self, rule: _core.SparsePolicy | None = None, **options: object) -> _core.Sequence:
        sizes = {"cache_type": "f32", **SIZES, **options}
        return _core.Sequence(self.main, rule or _core.dense_policy(), **sizes)

    def drafting(self, **options: object) -> _core.Sequence:
        sizes = {"cache_type": "f32", **SIZES, **options}
        session = _core.Sequence(self.layer, _core.dense_policy(), **sizes)
        session.keeps_hidden = True
        return session


def load(path: Path) -> Pair:
    return _load(path, _core.active_isa())


@cache
def _load(path: Path, isa: str) -> Pair:
    with NativeModelFile(path) as file:
        layer = file.open_drafting_layer()
        model = file.load()
        own = model.load_drafting_layer(layer)
    return Pair(model._core_model, own._core_model, _reference(path))


@cache
def _reference(path: Path) -> ReferenceDecoder:
    """Read once for all instruction sets."""
    return ReferenceDecoder.from_gguf(path)


def shifted(hidden: np.ndarray) -> np.ndarray:
    """What goes before every token: zeros, then the rows of all tokens but the last."""
    return np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])


def check(found: np.ndarray, exact: np.ndarray, emulated: np.ndarray) -> None:
    """The error is that of activations of 8 bits in exact arithmetic, with a margin for chance."""
    limit = CHANCE_MARGIN * relative_error(emulated, exact) + FLOAT_TOLERANCE
    assert relative_error(found, exact) < limit


@pytest.mark.parametrize(("architecture", "tensor_type"), CASES)
def test_guesses_are_those_of_the_reference(
    tiny_model: TinyModelFactory, isa: str, architecture: str, tensor_type: str
) -> None:
    """A prompt in calls of several kinds, then guesses from the layer's own hidden rows."""
    options = OPTIONS[architecture]
    pair = load(
        tiny_model(
            architecture=architecture, tensor_type=tensor_type, n_drafting_layers=1, **options
        )
    )
    tokens = random_tokens(N_TOKENS)
    rounded = {"scale_block_of": partial(_kernels.scale_block, isa)}
    main, emulated_main = (pair.reference.start(DenseLayer, **each) for each in ({}, rounded))
    main.prefill(tokens)
    emulated_main.prefill(tokens)
    session = pair.session()
    session.keeps_hidden = True
    rows = []
    for first, end in ((0, CHUNK_SIZE), (CHUNK_SIZE, N_TOKENS - 9)):
        session.prefill(tokens[first:end], is_last=end == N_TOKENS - 9)
        rows.append(session.hidden)
    session.decode(int(tokens[N_TOKENS - 9]))
    rows.append(session.hidden)
    session.decode_batch(tokens[N_TOKENS - 8 :])
    rows.append(session.hidden)
    hidden = np.concatenate(rows)
    assert hidden.dtype == np.float32
    check(hidden, main.hidden, emulated_main.hidden)

    layer = drafting_decoder(pair.reference)
    runs = start_drafting(layer), start_drafting(layer, **rounded)
    before = shifted(hidden)
    expected = [run.read(tokens, before) for run in runs]
    drafts = pair.drafting()
    drafts.prefill(tokens[:50], is_last=False, hidden=before[:50])
    last = drafts.prefill(tokens[50:80], is_last=True, hidden=before[50:80])
    check(last, *(rows[79] for rows in expected))
    check(drafts.hidden, *(run.hidden[50:80] for run in runs))
    logits = drafts.decode_batch(tokens[80:], hidden=before[80:])
    drafts.accept(len(tokens) - 81)
    check(logits, *(rows[80:] for rows in expected))
    # Guesses: every reference goes on from its own rows, as the core does.
    own, guesses = drafts.hidden[-1:], random_tokens(N_GUESSES, seed=3)
    others = [run.hidden[-1:] for run in runs]
    found, wanted = [], ([], [])
    for token in guesses:
        found.append(drafts.decode(int(token), own))
        own = drafts.hidden
        for i, run in enumerate(runs):
            wanted[i].append(run.read(token[None], others[i])[0])
            others[i] = run.hidden
    check(np.stack(found), *(np.stack(rows) for rows in wanted))


RULES: dict[str, Callable[[], _core.SparsePolicy]] = {
    "dense": _core.dense_policy,
    "h2o": lambda: _core.h2o_policy(12, 4),
    "h2o, tail": lambda: _core.h2o_policy(12, 4, tail=1),
    "headwise": lambda: _core.headwise_policy([8, 16] * 2, local=4, page_size=16, tail=8),
}


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0"])
@pytest.mark.parametrize("rule", RULES)
def test_an_answer_does_not_depend_on_kept_rows(
    tiny_model: TinyModelFactory, isa: str, rule: str, tensor_type: str
) -> None:
    """Bit by bit, also what is cached and what the rule holds."""
    pair = load(
        tiny_model(architecture="qwen35", tensor_type=tensor_type, n_layers=4, n_drafting_layers=1)
    )
    tokens = random_tokens(200)
    sessions = [pair.session(RULES[rule](), cache_type="f16") for _ in range(2)]
    sessions[1].keeps_hidden = True
    answers = []
    for session in sessions:
        session.prefill(tokens[:128], is_last=False)
        logits = [session.prefill(tokens[128:], is_last=True, stays_open=True)]
        logits += [session.decode(5), *session.decode_batch(np.array([6, 7, 8], np.int32))]
        session.accept(1)
        answers.append(np.stack([*logits, session.decode(9)]))
    np.testing.assert_array_equal(answers[0], answers[1])
    for rows, others in zip(*(each.cached_rows() for each in sessions), strict=True):
        np.testing.assert_array_equal(rows, others)
    assert sessions[0].save_state() == sessions[1].save_state()
    assert sessions[0].pairs_computed == sessions[1].pairs_computed
    assert sessions[0].hidden is None


def test_the_head_has_the_first_tokens(
    tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of the others are not computed; the rest is as it is with all of them."""
    path = tiny_model(architecture="qwen35", tensor_type="Q4_0", n_layers=2, n_drafting_layers=1)
    whole = load(path)
    monkeypatch.setattr(drafting, "GUESSED_TOKENS", 128)
    _load.cache_clear()
    pair = load(path)
    _load.cache_clear()
    hidden = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    tokens = random_tokens(40)
    rows = []
    for each in (whole, pair):
        session = each.drafting()
        session.prefill(tokens[:39], is_last=False, hidden=hidden[:39])
        rows.append((session.decode(int(tokens[39]), hidden[39:]), session.hidden))
    assert rows[1][0].shape == (128,)
    np.testing.assert_array_equal(rows[0][0][:128], rows[1][0])
    np.testing.assert_array_equal(rows[0][1], rows[1][1])
    # Neither has a matrix of the vocabulary of its own.
    assert pair.layer.weight_bytes == whole.layer.weight_bytes < pair.main.weight_bytes


def test_rows_that_do_not_fit_are_refused(tiny_model: TinyModelFactory) -> None:
    pair = load(tiny_model(architecture="qwen35", n_layers=2, n_drafting_layers=1))
    drafts, hidden = pair.drafting(), np.zeros((3, 256), np.float32)
    tokens = random_tokens(3)
    with pytest.raises(ValueError, match="reads a hidden row beside every token"):
        drafts.prefill(tokens, is_last=True)
    with pytest.raises(ValueError, match=r"hidden rows must be \[3\]\[256\]"):
        drafts.prefill(tokens, is_last=True, hidden=hidden[:2])
    with pytest.raises(ValueError, match="this model reads tokens alone"):
        pair.session().prefill(tokens, is_last=True, hidden=hidden)
    with pytest.raises(ValueError, match="has a model that it belongs to"):
        _core.Model(pair.layer.config)
    drafts.prefill(tokens, is_last=True, hidden=hidden)
    assert drafts.position == 3

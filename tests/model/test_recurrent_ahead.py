"""Tokens that recurrent layers look at ahead: those that do not count leave nothing behind.

test_decode_batch.py has them among its architectures, where all tokens count.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import CHUNK_SIZE, MAX_CONTEXT, random_tokens
from tests.model.recurrent_models import MODELS
from tests.tiny_models import TinyModelFactory

N_PROMPT = 70
TOKENS, WRONG = random_tokens(64, seed=5), random_tokens(64, seed=6)
# Tokens of a call and how many of them count: all, the first alone, some, as many as taps and
# fewer, and more than a delta net would take in a chunk.
CALLS = (
    (4, 4),
    (5, 1),
    (16, 3),
    (2, 1),
    (3, 2),
    (16, 11),
    (9, 8),
    (16, 16),
    (2, 2),
    (1, 1),
    (8, 1),
)


@pytest.fixture(params=_core.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Runs the test with each instruction set; models are packed for it."""
    _core.use_isa(request.param)
    return request.param


@pytest.fixture(params=MODELS)
def options(request: pytest.FixtureRequest) -> dict[str, object]:
    return MODELS[request.param]


def _load(
    tiny_model: TinyModelFactory, options: dict[str, object], tensor_type: str = "F32"
) -> _core.Model:
    with NativeModelFile(tiny_model(**options, tensor_type=tensor_type)) as file:
        return file.load()._core_model


def _start(model: _core.Model, **options: object) -> _core.Sequence:
    sizes = {"max_context": MAX_CONTEXT, "batch_size": 128, "chunk_size": CHUNK_SIZE} | options
    sequence = _core.Sequence(model, _core.dense_policy(), **sizes)
    sequence.prefill(random_tokens(N_PROMPT), is_last=True, stays_open=True)
    return sequence


def _look_ahead(sequence: _core.Sequence, *, one_by_one: bool = False) -> np.ndarray:
    """Logits of TOKENS as far as CALLS go, each followed by wrong ones that do not count."""
    rows, first = [], 0
    for n_tokens, n_kept in CALLS:
        kept = TOKENS[first : first + n_kept]
        logits = sequence.decode_batch(np.concatenate([kept, WRONG[: n_tokens - n_kept]]))
        for _ in range(n_kept - 1 if one_by_one else 0):
            sequence.accept(1)
        if not one_by_one:
            sequence.accept(n_kept - 1)
        rows.append(logits[:n_kept])
        first += n_kept
    return np.concatenate(rows)


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0"])
def test_tokens_that_do_not_count_leave_nothing(
    tiny_model: TinyModelFactory, isa: str, options: dict[str, object], tensor_type: str
) -> None:
    model = _load(tiny_model, options, tensor_type)
    tidy, hasty = _start(model), _start(model, threads=3)
    n_tokens = sum(n_kept for _, n_kept in CALLS)
    expected = np.stack([tidy.decode(int(token)) for token in TOKENS[:n_tokens]])
    np.testing.assert_array_equal(_look_ahead(hasty), expected)
    assert hasty.token_ids == tidy.token_ids and hasty.position == tidy.position
    assert hasty.save_state() == tidy.save_state()
    for sequence in (tidy, hasty):  # a turn that goes on from there
        sequence.prefill(random_tokens(30, seed=9), is_last=False)
    assert hasty.save_state() == tidy.save_state()


def test_states_can_be_saved_and_left_between(
    tiny_model: TinyModelFactory, options: dict[str, object]
) -> None:
    """Whether it is settled by the next call or by a mark, and however tokens are counted."""
    model = _load(tiny_model, options)
    at_once, marked = _start(model), _start(model)
    _look_ahead(at_once, one_by_one=True)
    first = 0
    for n_tokens, n_kept in CALLS:
        kept = TOKENS[first : first + n_kept]
        marked.decode_batch(np.concatenate([kept, WRONG[: n_tokens - n_kept]]))
        marked.accept((n_kept - 1) // 2)
        before = marked.save_state()
        with pytest.raises(ValueError, match="cannot accept 16 tokens"):
            marked.accept(16)
        assert marked.save_state() == before
        first += n_kept
        for token in kept[1 + (n_kept - 1) // 2 :]:
            marked.decode(int(token))
    assert marked.save_state() == at_once.save_state()
    marked.rewind(marked.marks[0])
    np.testing.assert_array_equal(_look_ahead(marked), _look_ahead(_start(model)))


def test_an_interrupted_call_can_be_left(
    tiny_model: TinyModelFactory, options: dict[str, object]
) -> None:
    model = _load(tiny_model, options)
    sequence = _start(model)
    sequence.decode_batch(TOKENS[:6])
    sequence.accept(2)
    with pytest.raises(RuntimeError, match="enough"):

        def stop(*_: int) -> None:
            raise RuntimeError("enough")

        sequence.prefill(TOKENS[:9], is_last=False, on_layer=stop)
    sequence.rewind(N_PROMPT)
    np.testing.assert_array_equal(_look_ahead(sequence), _look_ahead(_start(model)))


def test_what_it_takes_is_counted_apart(tiny_model: TinyModelFactory) -> None:
    model = _load(tiny_model, MODELS["qwen35"])
    sizes = _start(model).memory_bytes
    assert 0 < sizes["recurrent_state"] < sizes["recurrent_ahead"]
    sizes = {"max_context": MAX_CONTEXT, "batch_size": 1, "chunk_size": 1}
    one = _core.Sequence(model, _core.dense_policy(), **sizes)
    assert one.max_decode_tokens == 1 and "recurrent_ahead" not in one.memory_bytes

"""Marks: a sequence goes back to one, also from a call that was interrupted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeh2o import _core
from tests.model.model_pair import CHUNK_SIZE, ModelPair, load_pair, random_tokens
from tests.tiny_models import TinyModelFactory

BATCH = 2 * CHUNK_SIZE
POLICIES: dict[str, Callable[[], _core.SparsePolicy]] = {
    "dense": _core.dense_policy,
    "h2o": lambda: _core.h2o_policy(12, 4, tail=20),
    "headwise": lambda: _core.headwise_policy([None, 8, 16, 40], local=4, page_size=16),
    "ruvllm": lambda: _core.ruvllm_policy(window=20, block_size=8),
    "recall": lambda: _core.headwise_policy([None, 8, 16, None], local=4, max_past=32),
}


# All have four slots.
MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "lfm2": {"architecture": "lfm2", "n_layers": 4},
    "qwen35": {"architecture": "qwen35", "n_layers": 4},
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tiny_model: TinyModelFactory) -> ModelPair:
    return load_pair(tiny_model, **MODELS[request.param], tensor_type="Q8_0")


def read(sequence: _core.Sequence, tokens: np.ndarray, *, marks: bool = True) -> np.ndarray:
    """Reads the rest of ``tokens`` in whole batches, marking where they begin; the last logits."""
    logits = None
    while sequence.position < len(tokens):
        if marks:
            assert sequence.mark()
        first = sequence.position
        end = min(first // BATCH * BATCH + BATCH, len(tokens))
        logits = sequence.prefill(tokens[first:end], is_last=end == len(tokens), stays_open=True)
    assert logits is not None
    return logits


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_goes_on_as_the_sequence_would_from_its_mark(pair: ModelPair, policy: str) -> None:
    def start(max_context: int) -> _core.Sequence:
        sizes = {"batch_size": BATCH, "chunk_size": CHUNK_SIZE, "max_context": max_context}
        return _core.Sequence(pair.core, POLICIES[policy](), **sizes)

    tokens = random_tokens(3 * BATCH + 5)
    first = start(4 * BATCH)
    read(first, tokens)
    for token in random_tokens(3, seed=1):
        first.decode(int(token))
    assert first.marks[:4] == [0, BATCH, 2 * BATCH, 3 * BATCH]
    assert set(first.marks[4:]) <= {len(tokens)}  # the end, with recurrent layers
    other = np.concatenate([tokens[: 2 * BATCH], random_tokens(BATCH + 7, seed=2)])
    whole, copy = start(4 * BATCH), start(6 * BATCH)  # rows of heads lie elsewhere
    read(copy, random_tokens(50, seed=3))
    copy.copy_from(first, 2 * BATCH)
    assert (copy.token_ids, copy.marks) == (tokens[: 2 * BATCH].tolist(), [0, BATCH, 2 * BATCH])
    np.testing.assert_array_equal(read(copy, other), read(whole, other))
    assert copy.save_state() == whole.save_state()
    assert first.position == 3 * BATCH + 8  # left as it was
    with pytest.raises(ValueError, match=f"nothing is noted of the state at position {BATCH + 1}"):
        copy.copy_from(first, BATCH + 1)
    with pytest.raises(ValueError, match="to itself"):
        first.copy_from(first, BATCH)


@pytest.mark.parametrize("policy", POLICIES)
def test_marks_survive_with_a_saved_state(pair: ModelPair, policy: str) -> None:
    def start() -> _core.Sequence:
        return pair.session(POLICIES[policy](), batch_size=BATCH)

    tokens = random_tokens(3 * BATCH + 5)
    saved, loaded, whole = start(), start(), start()
    read(saved, tokens)
    loaded.load_state(saved.save_state(), saved.token_ids, saved.mark_states)
    # An open prompt of a model with a recurrent state is marked at its end too.
    end = [len(tokens)] if "recurrent_state" in saved.memory_bytes else []
    assert loaded.marks == saved.marks == [0, BATCH, 2 * BATCH, 3 * BATCH, *end]
    assert loaded.mark_states == saved.mark_states
    for rows, theirs in zip(loaded.cached_rows(), saved.cached_rows(), strict=True):
        rows[:] = theirs
    other = np.concatenate([tokens[: 2 * BATCH], random_tokens(BATCH + 7, seed=2)])
    loaded.rewind(2 * BATCH)
    np.testing.assert_array_equal(read(loaded, other), read(whole, other))
    states = saved.mark_states
    for bad in ([states[1], states[1]], [states[2], states[1]], [states[0], b"x"], [states[3]] * 2):
        with pytest.raises(ValueError):
            loaded.load_state(saved.save_state(), saved.token_ids, bad)
        assert (loaded.position, loaded.marks, loaded.token_ids) == (0, [], [])
    whole.rewind(BATCH)
    with pytest.raises(ValueError, match="out of order"):  # the end lies before a mark
        loaded.load_state(whole.save_state(), whole.token_ids, states)


def test_a_copy_needs_a_sequence_of_the_same_kind(pair: ModelPair) -> None:
    source = pair.session(_core.dense_policy(), batch_size=BATCH)
    read(source, random_tokens(BATCH + 1))
    for policy, cache_type in ((_core.dense_policy(), "f32"), (_core.h2o_policy(12, 4), "f16")):
        sizes = {"batch_size": BATCH, "chunk_size": CHUNK_SIZE, "max_context": 4 * BATCH}
        copy = _core.Sequence(pair.core, policy, cache_type=cache_type, **sizes)
        with pytest.raises(ValueError, match=r"other|differ"):
            copy.copy_from(source, BATCH)
        assert copy.position == 0


@pytest.mark.parametrize("policy", POLICIES)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_departure_from_a_prompt_equals_a_whole_read(
    pair: ModelPair, policy: str, data: st.DataObject
) -> None:
    session = pair.session(POLICIES[policy](), batch_size=BATCH, all_rows=False)
    tokens = random_tokens(data.draw(st.integers(1, 4 * BATCH), label="length"))
    read(session, tokens)
    for turn in range(3):
        for token in random_tokens(data.draw(st.integers(0, 3), label="answer"), seed=turn):
            session.decode(int(token))
        depart = data.draw(st.integers(0, session.position - 1), label="depart")
        mark = session.find_mark(min(depart, session.prefill_end - 1))
        assert mark % BATCH == 0
        session.rewind(mark)
        assert (session.position, session.prompt_logits) == (mark, None)
        more = random_tokens(data.draw(st.integers(1, 2 * BATCH), label="more"), seed=50 + turn)
        tokens = np.concatenate([session.token_ids, more])[: 4 * BATCH].astype(np.int32)
        if len(tokens) == mark:
            continue
        whole = pair.session(POLICIES[policy](), batch_size=BATCH, all_rows=False)
        np.testing.assert_array_equal(read(session, tokens), read(whole, tokens, marks=False))
        assert session.save_state() == whole.save_state()
        assert session.token_ids == whole.token_ids == tokens.tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("failing_layer", [1, 2])
def test_a_mark_heals_an_interrupted_call(pair: ModelPair, policy: str, failing_layer: int) -> None:
    tokens = random_tokens(3 * BATCH)
    session, whole = (pair.session(POLICIES[policy](), batch_size=BATCH) for _ in range(2))
    expected = read(whole, tokens, marks=False)

    def fail(done: int, total: int) -> None:
        if done == failing_layer:
            raise KeyboardInterrupt

    for begin in (0, BATCH):
        session.mark()
        session.prefill(tokens[begin : begin + BATCH], is_last=False)
    session.mark()
    with pytest.raises(KeyboardInterrupt):
        session.prefill(tokens[2 * BATCH :], is_last=True, on_layer=fail)
    assert session.position == len(session.token_ids) == 2 * BATCH
    with pytest.raises(ValueError, match="interrupted"):
        session.decode(3)
    assert session.find_mark(10**6) == 2 * BATCH
    session.rewind(2 * BATCH)
    np.testing.assert_array_equal(read(session, tokens), expected)


def test_positions_that_are_not_marked(pair: ModelPair) -> None:
    session = pair.session(_core.h2o_policy(12, 4), batch_size=BATCH)
    session.prefill(random_tokens(BATCH), is_last=False)
    session.mark()
    session.prefill(random_tokens(BATCH), is_last=True, stays_open=True)
    session.decode(3)
    found = [session.find_mark(n) for n in (0, BATCH - 1, BATCH, 2 * BATCH - 1)]
    assert found == [0, 0, BATCH, BATCH]
    assert session.find_mark(10**6) == 2 * BATCH + 1
    with pytest.raises(ValueError, match="nothing is noted of the state there"):
        session.rewind(BATCH + 1)
    with pytest.raises(ValueError, match=f"the tokens end at {2 * BATCH + 1}"):
        session.rewind(2 * BATCH + 2)
    session.rewind(2 * BATCH)
    assert session.prompt_logits is not None
    session.reset()
    assert session.find_mark(10**6) == 0


def test_a_rule_in_python_has_no_marks(pair: ModelPair) -> None:
    class Rule:
        def select_memory(self, *_: object) -> list[int]:
            return []

    session = pair.session(_core.python_policy(Rule()), batch_size=BATCH)
    session.prefill(random_tokens(BATCH), is_last=False)
    assert not session.mark()
    assert session.find_mark(BATCH - 1) == 0

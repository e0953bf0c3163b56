"""Steps of several sequences in one call: a sequence gets what it gets alone, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgeh2o import _core
from tests.model.model_pair import ModelPair, Tokens, load_pair, random_tokens
from tests.tiny_models import TinyModelFactory

MakePolicy = Callable[[], _core.SparsePolicy]
# Of other policies, contexts, chunks and cache types, so that they lay out the scratch otherwise.
SEQUENCES: dict[str, tuple[MakePolicy, dict[str, object]]] = {
    "h2o": (
        lambda: _core.h2o_policy(12, 4),
        {"max_context": 400, "batch_size": 128, "chunk_size": 64},
    ),
    "headwise": (
        lambda: _core.headwise_policy([None, 8, 16, 40], local=4, page_size=16),
        {"max_context": 640, "batch_size": 96, "chunk_size": 32, "cache_type": "f32"},
    ),
    "dense": (
        _core.dense_policy,
        {"max_context": 300, "batch_size": 64, "chunk_size": 64, "all_rows": True},
    ),
}
LENGTHS = {"h2o": [128, 100], "headwise": [96, 96, 70], "dense": [64, 1]}
N_ANSWER = 5


@pytest.fixture(scope="module", params=["F32", "Q4_0"])
def pair(request: pytest.FixtureRequest, tiny_model: TinyModelFactory) -> ModelPair:
    return load_pair(tiny_model, tensor_type=request.param, sliding_window=24)


def make_sequence(
    pair: ModelPair, name: str, workspace: _core.Workspace | None = None
) -> _core.Sequence:
    make_policy, sizes = SEQUENCES[name]
    return _core.Sequence(pair.core, make_policy(), workspace=workspace, **sizes)


def calls_of(name: str) -> list[tuple[Tokens, bool | None]]:
    """The prompt of a sequence in calls, and the tokens after it."""
    lengths = LENGTHS[name]
    tokens = random_tokens(sum(lengths) + N_ANSWER, seed=len(name))
    parts = np.split(tokens, np.cumsum([*lengths, *[1] * (N_ANSWER - 1)]))
    flags = [False] * (len(lengths) - 1) + [True] + [None] * N_ANSWER
    return list(zip(parts, flags, strict=True))


def run_alone(sequence: _core.Sequence, name: str) -> list[np.ndarray | None]:
    return [
        sequence.decode(int(tokens[0]))
        if is_last is None
        else sequence.prefill(tokens, is_last=is_last)
        for tokens, is_last in calls_of(name)
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("names", [("h2o", "headwise"), ("dense", "headwise", "h2o")])
def test_interleaved_prompts_equal_those_alone(
    pair: ModelPair, names: tuple[str, ...], threads: int
) -> None:
    expected = {name: run_alone(make_sequence(pair, name), name) for name in names}
    workspace = _core.Workspace(pair.core, threads)
    assert workspace.threads == threads
    sequences = {name: make_sequence(pair, name, workspace) for name in names}
    calls = {name: calls_of(name) for name in names}
    got: dict[str, list[np.ndarray | None]] = {name: [] for name in names}
    # Prompts of other lengths: prefill of one meets decode of another.
    while any(calls.values()):
        turn = [name for name in names if calls[name]]
        steps = [(sequences[name], *calls[name].pop(0)) for name in turn]
        for name, logits in zip(turn, workspace.forward(steps), strict=True):
            got[name].append(logits)
    for name in names:
        for logits, wanted in zip(got[name], expected[name], strict=True):
            assert (logits is None) == (wanted is None)
            if wanted is not None:
                assert logits is not None
                np.testing.assert_array_equal(logits.reshape(wanted.shape), wanted)
        alone = make_sequence(pair, name)
        run_alone(alone, name)
        assert sequences[name].save_state() == alone.save_state()
        assert sequences[name].token_ids == alone.token_ids
        for rows, others in zip(sequences[name].cached_rows(), alone.cached_rows(), strict=True):
            np.testing.assert_array_equal(rows, others)


def test_calls_that_take_turns_on_a_workspace(pair: ModelPair) -> None:
    expected = {name: run_alone(make_sequence(pair, name), name) for name in SEQUENCES}
    workspace = _core.Workspace(pair.core, 2)
    sequences = {name: make_sequence(pair, name, workspace) for name in SEQUENCES}
    for name, sequence in sequences.items():
        for logits, wanted in zip(run_alone(sequence, name), expected[name], strict=True):
            if wanted is not None:
                np.testing.assert_array_equal(logits, wanted)


def test_rows_of_a_prefill_last_until_the_next_call(pair: ModelPair) -> None:
    workspace = _core.Workspace(pair.core, 1)
    sequence, other = (make_sequence(pair, "dense", workspace) for _ in range(2))
    sequence.prefill(random_tokens(9), is_last=False)
    assert sequence.row_logits(0, 9).shape == (9, sequence.vocab_size)
    other.prefill(random_tokens(9), is_last=False)
    with pytest.raises(ValueError, match="not among the 0 of the latest prefill call"):
        sequence.row_logits(0, 1)


def test_steps_that_cannot_be_made_change_nothing(pair: ModelPair) -> None:
    workspace = _core.Workspace(pair.core)
    h2o, headwise = (make_sequence(pair, name, workspace) for name in ("h2o", "headwise"))
    good = (h2o, random_tokens(64), False)
    for steps, message in (
        ([], "no steps"),
        ([good, good], "twice"),
        ([good, (make_sequence(pair, "dense"), random_tokens(3), True)], "another workspace"),
        ([good, (headwise, random_tokens(97), True)], "1 to 96 tokens, got 97"),
        ([good, (headwise, random_tokens(17), None)], "takes 1 to 16 tokens, got 17"),
        ([good, (headwise, random_tokens(0), None)], "takes 1 to 96 tokens, got 0"),
        ([good, (headwise, np.array([10**6], np.int32), True)], "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            workspace.forward(steps)
        assert (h2o.position, headwise.position) == (0, 0)
    workspace.forward([good, (headwise, random_tokens(96), False)])
    assert (h2o.position, headwise.position) == (64, 96)


def test_a_workspace_of_another_model_is_refused(tiny_model: TinyModelFactory) -> None:
    first, second = (load_pair(tiny_model, tensor_type=kind) for kind in ("F16", "Q8_0"))
    with pytest.raises(ValueError, match="of another model"):
        make_sequence(first, "dense", _core.Workspace(second.core))

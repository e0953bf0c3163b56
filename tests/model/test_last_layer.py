"""The last layer's output is computed for the last token only, unless all rows are asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgeh2o import _core
from tests.model.model_pair import (
    CHUNK_SIZE,
    MAX_CONTEXT,
    ModelPair,
    layers_of,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
    split,
)
from tests.reference.pairs import pairs_dense
from tests.tiny_models import TinyModelFactory

N_TOKENS = 3 * CHUNK_SIZE + 20
BUDGETS = [None, 8, 16, 40]
# Whether the last token reads everything in the last layer, so that no other one is needed there.
POLICIES: dict[str, tuple[Callable[[], _core.SparsePolicy], bool]] = {
    "dense": (_core.dense_policy, True),
    "h2o": (lambda: _core.h2o_policy(12, 4), False),
    "h2o, tail": (lambda: _core.h2o_policy(12, 4, tail=1), True),
    "headwise": (lambda: _core.headwise_policy(BUDGETS, local=4, page_size=16), False),
    "headwise, tail": (lambda: _core.headwise_policy(BUDGETS, local=4, tail=8), True),
    "recall, tail": (lambda: _core.headwise_policy(BUDGETS, local=4, max_past=32, tail=8), True),
}
# The single row takes the kernels of decoding: other orders of additions, of 16-bit keys.
TOLERANCE = 1e-5


@pytest.fixture(params=["F32", "Q4_0"])
def pair(request: pytest.FixtureRequest, tiny_model: TinyModelFactory) -> ModelPair:
    return load_pair(tiny_model, tensor_type=request.param)


def answer(session: _core.Sequence, batches: list[np.ndarray]) -> np.ndarray:
    """Logits of the last prompt token, and of three tokens that follow it: [4, vocab_size]."""
    session.reset()
    for batch in batches[:-1]:
        assert session.prefill(batch, is_last=False) is None
    logits = session.prefill(batches[-1], is_last=True)
    assert logits is not None
    return np.stack([logits, *(session.decode(token) for token in (5, 6, 7))])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[N_TOKENS], [2 * CHUNK_SIZE, CHUNK_SIZE + 20], [211, 1], [1]])
def test_answers_are_those_of_all_rows(pair: ModelPair, policy: str, lengths: list[int]) -> None:
    batches = split(random_tokens(sum(lengths)), lengths)
    make_policy, _ = POLICIES[policy]
    whole, short = (pair.session(make_policy(), all_rows=rows) for rows in (True, False))
    expected, logits = answer(whole, batches), answer(short, batches)
    assert relative_error(logits, expected) < TOLERANCE
    for rows, others in zip(whole.cached_rows(), short.cached_rows(), strict=True):
        n_prompt_bytes = len(rows) // (sum(lengths) + 3) * sum(lengths)
        np.testing.assert_array_equal(rows[:n_prompt_bytes], others[:n_prompt_bytes])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_layer_is_attended_only_where_that_is_needed(pair: ModelPair, policy: str) -> None:
    make_policy, is_skipped = POLICIES[policy]
    batches = split(random_tokens(N_TOKENS), [2 * CHUNK_SIZE, N_TOKENS - 2 * CHUNK_SIZE])
    policies = [make_policy() for _ in range(2)]
    for each, rows in zip(policies, (True, False), strict=True):
        answer(pair.session(each, all_rows=rows), batches)
    whole, short = ([each.memory_set(1, head) for head in range(2)] for each in policies)
    assert all(len(positions) > 0 for positions in whole)
    for positions, others in zip(whole, short, strict=True):
        np.testing.assert_array_equal(others, [] if is_skipped else positions)
    for head in range(2):
        np.testing.assert_array_equal(
            policies[0].memory_set(0, head), policies[1].memory_set(0, head)
        )


GEMMA4 = {
    **{"n_layers": 6, "head_dim": 32, "head_dim_sliding": 16, "n_shared_kv": 3},
    "token_input_dim": 8,
}

# Of the same layers, heads alike.
GEMMA3N = {"n_layers": 6, "n_shared_kv": 3, "token_input_dim": 8, "n_cut_layers": 5}


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3n", "gemma4"])
def test_layers_with_a_window(tiny_model: TinyModelFactory, name: str) -> None:
    options: dict[str, object] = {
        "mistral": {},
        "gemma3": {"n_layers": 6},
        "gemma3n": GEMMA3N,
        "gemma4": GEMMA4,
    }[name]
    architecture = "llama" if name == "mistral" else name
    pair = load_pair(
        tiny_model, tensor_type="F32", architecture=architecture, sliding_window=24, **options
    )
    batches = split(random_tokens(N_TOKENS), [2 * CHUNK_SIZE, N_TOKENS - 2 * CHUNK_SIZE])
    for make_policy in (_core.dense_policy, lambda: _core.h2o_policy(12, 4)):
        expected, logits = (
            answer(pair.session(make_policy(), cache_type="f32", all_rows=rows), batches)
            for rows in (True, False)
        )
        assert relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("policy", ["dense", "h2o", "headwise"])
def test_layers_without_keys_and_values_compute_the_last_token(
    tiny_model: TinyModelFactory, policy: str, name: str
) -> None:
    options: dict[str, object] = {"gemma3n": GEMMA3N, "gemma4": GEMMA4}[name]
    pair = load_pair(tiny_model, tensor_type="F32", architecture=name, sliding_window=24, **options)
    make_policy = {
        "dense": _core.dense_policy,
        "h2o": lambda: _core.h2o_policy(12, 4),
        "headwise": lambda: _core.headwise_policy([16] * 12, local=8, tail=20),
    }[policy]
    batches = split(random_tokens(N_TOKENS), [2 * CHUNK_SIZE, N_TOKENS - 2 * CHUNK_SIZE])
    sessions = [
        pair.session(make_policy(), cache_type="f32", all_rows=rows) for rows in (True, False)
    ]
    expected, logits = (answer(session, batches) for session in sessions)
    assert relative_error(logits, expected) < 1e-5
    # Three layers have rows: of two KV heads each, keys and values.
    assert [len(session.cached_rows()) for session in sessions] == [3 * 2 * 2] * 2
    # Layers that attend for all tokens: two of three have windows. Without rows for everyone the
    # third, which has none, is not among them, unless h2o scores what its tokens read.
    window = sum(min(i + 1, 24) for i in range(N_TOKENS))
    full = pairs_dense(N_TOKENS)
    layers = {True: 6, False: 6 if policy == "h2o" else 2}
    for session, all_rows in zip(sessions, layers, strict=True):
        n_full = layers[all_rows] // 3
        dense = ((layers[all_rows] - n_full) * window + n_full * full) // layers[all_rows]
        assert session.pairs_dense == dense


def test_the_reference_gives_the_same(tiny_model: TinyModelFactory) -> None:
    pair = load_pair(tiny_model, tensor_type="F32")
    tokens = random_tokens(N_TOKENS)
    expected = pair.reference.start(layers_of("dense")[0]).prefill(tokens)[-1]
    session = pair.session(_core.dense_policy(), cache_type="f32", all_rows=False)
    logits = session.prefill(tokens, is_last=True)
    assert relative_error(logits, expected) < 2e-5


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chat_goes_on_and_can_be_saved(pair: ModelPair, policy: str) -> None:
    tokens = random_tokens(N_TOKENS + 40)
    make_policy, _ = POLICIES[policy]

    def turns(session: _core.Sequence, other: _core.Sequence | None = None) -> np.ndarray:
        session.prefill(tokens[:N_TOKENS], is_last=True, stays_open=True)
        session.decode(5)
        if other is not None:
            other.load_state(session.save_state())
            for rows, copy in zip(session.cached_rows(), other.cached_rows(), strict=True):
                copy[:] = rows
            session = other
        logits = session.prefill(tokens[N_TOKENS:], is_last=True)
        return np.stack([logits, session.decode(6)])

    expected = turns(pair.session(make_policy()))
    logits = turns(pair.session(make_policy(), all_rows=False))
    assert relative_error(logits, expected) < TOLERANCE
    sessions = [pair.session(make_policy(), all_rows=False) for _ in range(2)]
    np.testing.assert_array_equal(turns(*sessions), logits)


def test_pairs_are_averaged_over_the_layers_that_attend(tiny_model: TinyModelFactory) -> None:
    pair = load_pair(tiny_model, tensor_type="F32", architecture="gemma2", sliding_window=24)
    tokens = random_tokens(N_TOKENS)
    session = pair.session(_core.h2o_policy(12, 4, tail=1), all_rows=False)
    session.prefill(tokens, is_last=True)
    in_window = sum(min(position + 1, 24) for position in range(N_TOKENS))
    assert session.pairs_computed == session.pairs_dense == in_window  # of the first layer
    one_layer = load_pair(tiny_model, tensor_type="F32", n_layers=1)
    session = one_layer.session(_core.dense_policy(), all_rows=False)
    session.prefill(tokens, is_last=True)
    assert session.pairs_computed == session.pairs_dense == 0


def test_rows_that_were_not_computed_are_refused(tiny_model: TinyModelFactory) -> None:
    pair = load_pair(tiny_model, tensor_type="F32")
    session = pair.session(_core.dense_policy(), all_rows=False)
    tokens = random_tokens(MAX_CONTEXT // 2)
    logits = session.prefill(tokens, is_last=True)
    with pytest.raises(ValueError, match="all_rows"):
        session.row_logits(len(tokens) - 1, 1)
    assert session.position == len(tokens)  # the call did not break it
    whole = pair.session(_core.dense_policy())
    assert relative_error(logits, prefill(whole, tokens)[-1]) < 1e-5


def test_a_layer_without_rows_is_not_shown(tiny_model: TinyModelFactory) -> None:
    pair = load_pair(tiny_model, tensor_type="F32")
    tokens = random_tokens(MAX_CONTEXT // 2)
    seen: dict[bool, dict[int, list[np.ndarray]]] = {True: {}, False: {}}
    for all_rows, layers in seen.items():
        session = pair.session(_core.dense_policy(), all_rows=all_rows)

        def note(
            layer: int, *rows: np.ndarray, layers: dict[int, list[np.ndarray]] = layers
        ) -> None:
            assert not any(row.flags.writeable for row in rows)
            layers[layer] = [row.copy() for row in rows]

        session.prefill(tokens, is_last=True, on_attention=note)
    whole, part = seen[True], seen[False]
    assert sorted(part) == sorted(whole)[:-1]
    for layer, rows in part.items():
        for mine, other in zip(rows, whole[layer], strict=True):
            np.testing.assert_array_equal(mine, other)

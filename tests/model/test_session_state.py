"""A saved session goes on exactly as if it had not been interrupted; bad states are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from edgeh2o import _core
from tests.model.model_pair import (
    CHUNK_SIZE,
    MAX_CONTEXT,
    UNEQUAL,
    VOCAB_SIZE,
    ModelPair,
    decisive_prompt,
    load_pair,
    make_h2o,
    random_tokens,
    relative_error,
)
from tests.tiny_models import TinyModelFactory

MakePolicy = Callable[..., _core.SparsePolicy]
N_PROMPT, N_ANSWER, N_MORE = 3 * CHUNK_SIZE + 20, 5, 2 * CHUNK_SIZE + 9
WINDOW = 24
# u64 position, prefill_end, pairs_dense, pairs, u8 for each of four slots how it is read; per slot
# of H2O: u64 n_memory, chunk_begin, n_scored.
SESSION_HEADER, SLOT_HEADER = struct.Struct("<4Q4x"), struct.Struct("<3Q")


@pytest.fixture(scope="module")
def pair(tiny_model: TinyModelFactory) -> ModelPair:
    return load_pair(tiny_model, tensor_type="Q4_0")


def _start(session: _core.Sequence, tokens: np.ndarray) -> None:
    """A first turn of N_PROMPT tokens and a decoded answer, such that a next turn may follow."""
    session.prefill(tokens[:N_PROMPT], is_last=False)
    for token in tokens[N_PROMPT : N_PROMPT + N_ANSWER]:
        session.decode(int(token))


def _go_on(session: _core.Sequence, tokens: np.ndarray) -> list[np.ndarray]:
    """All logits of a second turn and of one token after it."""
    session.prefill(tokens[N_PROMPT + N_ANSWER : -1], is_last=False)
    return [session.row_logits(0, N_MORE - 1), session.decode(int(tokens[-1]))]


def _copy_rows(source: _core.Sequence, target: _core.Sequence) -> None:
    for rows, copy in zip(source.cached_rows(), target.cached_rows(), strict=True):
        assert len(rows) == len(copy) > 0
        copy[:] = rows


def _headwise(*budgets: int | None, **options: int) -> MakePolicy:
    return lambda n_slots=4: _core.headwise_policy((budgets * 2)[:n_slots], **options)


# Policies of a number of layers times KV heads.
POLICIES: dict[str, MakePolicy] = {
    "dense": lambda n_slots=4: _core.dense_policy(),
    "h2o": lambda n_slots=4: _core.h2o_policy(12, 4),
    "headwise": _headwise(None, 8, 16, 40, local=4, sinks=2, page_size=16),
    "recall": _headwise(None, 8, 16, None, local=4, max_past=32),
    "ruvllm": lambda n_slots=4: _core.ruvllm_policy(window=9, block_size=8),
    "joined pages": _headwise(None, 8, 16, None, local=4, page_size=1, max_past=20),
    # Four to a KV head.
    "decode": _headwise(None, 8, 16, 40, local=4, sinks=2, page_size=16, decode_from=20),
    "query heads": lambda n_slots=4: _core.headwise_policy(
        [8, None, 16, 40, 8, 8, None, None] * (n_slots // 2), by_query_head=True, local=4, sinks=2
    ),
}
OF_KV_HEADS = sorted(POLICIES.keys() - {"query heads"})


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0", "q8_0/f16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loaded_session_goes_on_bit_for_bit(
    pair: ModelPair, policy: str, cache_type: str
) -> None:
    _check_that_it_goes_on(pair, POLICIES[policy], cache_type)


@pytest.mark.parametrize("is_larger", [True, False])
def test_a_session_of_another_context_goes_on(pair: ModelPair, is_larger: bool) -> None:
    """Generated tokens may go by budgets in one of the two, after longer prompts than fit both."""
    tokens = random_tokens(N_PROMPT + N_ANSWER + N_MORE)
    contexts = sorted((len(tokens) + 1, MAX_CONTEXT), reverse=not is_larger)

    def start(context: int) -> _core.Sequence:
        return _core.Sequence(
            pair.core,
            _headwise(8, 16, decode_from=MAX_CONTEXT)(4),
            max_context=context,
            batch_size=4 * CHUNK_SIZE,
            chunk_size=CHUNK_SIZE,
            cache_type="f16",
            all_rows=True,
        )

    before, after = map(start, contexts)
    _start(before, tokens)
    after.load_state(before.save_state())
    _copy_rows(before, after)
    for expected, logits in zip(_go_on(before, tokens), _go_on(after, tokens), strict=True):
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("policy", OF_KV_HEADS)
def test_a_session_of_layers_that_differ_goes_on_too(
    tiny_model: TinyModelFactory, policy: str, architecture: str
) -> None:
    pair = load_pair(tiny_model, **UNEQUAL, architecture=architecture, sliding_window=WINDOW)
    n_slots = sum(UNEQUAL["n_kv_heads"])
    _check_that_it_goes_on(pair, partial(POLICIES[policy], n_slots), "f16")


@pytest.mark.parametrize("policy", ["dense", "headwise"])
def test_a_session_with_recurrent_layers_goes_on_too(
    tiny_model: TinyModelFactory, policy: str
) -> None:
    pair = load_pair(tiny_model, architecture="lfm2", n_layers=4, tensor_type="Q4_0")
    _check_that_it_goes_on(pair, POLICIES[policy], "f16")


def _check_that_it_goes_on(pair: ModelPair, make_policy: MakePolicy, cache_type: str) -> None:
    tokens = random_tokens(N_PROMPT + N_ANSWER + N_MORE)
    whole = pair.session(make_policy(), cache_type=cache_type)
    _start(whole, tokens)
    loaded = pair.session(make_policy(), cache_type=cache_type)
    loaded.prefill(random_tokens(100, seed=9), is_last=False)  # to be forgotten
    loaded.load_state(whole.save_state())
    assert loaded.position == whole.position == N_PROMPT + N_ANSWER
    _copy_rows(whole, loaded)
    for expected, logits in zip(_go_on(whole, tokens), _go_on(loaded, tokens), strict=True):
        np.testing.assert_array_equal(logits, expected)
    assert loaded.pairs_computed == whole.pairs_computed
    assert loaded.pairs_dense == whole.pairs_dense
    assert loaded.save_state() == whole.save_state()


def test_turns_agree_with_the_definition(tiny_model: TinyModelFactory) -> None:
    """Prefill, decode, prefill, decode against the float64 reference."""
    pair = load_pair(tiny_model, tensor_type="F32")
    tokens = decisive_prompt(pair, N_PROMPT + N_ANSWER + N_MORE)
    session = pair.session(_core.h2o_policy(12, 4), cache_type="f32")
    _start(session, tokens)
    more, last = _go_on(session, tokens)
    run = pair.reference.start(make_h2o)
    run.prefill(tokens[:N_PROMPT])
    for token in tokens[N_PROMPT : N_PROMPT + N_ANSWER]:
        run.decode(int(token))
    expected = run.prefill(tokens[N_PROMPT + N_ANSWER : -1])
    margins = [chunk.margins.min() for layer in run.layers for chunk in layer.chunks]
    assert min(margins) > 1e-3, "a choice of a heavy hitter is a near tie; take other tokens"
    assert relative_error(more, expected) < 1e-4
    assert relative_error(last, run.decode(int(tokens[-1]))) < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_decoded_tokens_can_be_taken_back(pair: ModelPair, policy: str) -> None:
    tokens = random_tokens(N_PROMPT + N_ANSWER + N_MORE)
    session = pair.session(POLICIES[policy]())
    _start(session, tokens)
    expected = _go_on(session, tokens)
    session.reset()
    _start(session, tokens)
    for token in random_tokens(7, seed=3):
        session.decode(int(token))
    session.rewind(N_PROMPT + N_ANSWER)
    for logits, value in zip(_go_on(session, tokens), expected, strict=True):
        np.testing.assert_array_equal(logits, value)
    for position in (session.position + 1, session.prefill_end - 1):
        with pytest.raises(ValueError, match="cannot go back"):
            session.rewind(position)


def test_logits_at_the_end_of_a_turn_do_not_depend_on_what_follows(pair: ModelPair) -> None:
    tokens = random_tokens(N_PROMPT)
    session = pair.session(_core.h2o_policy(12, 4))
    last = session.prefill(tokens, is_last=True)
    session.reset()
    session.prefill(tokens, is_last=False)
    np.testing.assert_array_equal(session.row_logits(N_PROMPT - 1, 1)[0], last)


@pytest.fixture(scope="module")
def saved(pair: ModelPair) -> bytes:
    session = pair.session(_core.h2o_policy(12, 4))
    _start(session, random_tokens(N_PROMPT + N_ANSWER))
    return session.save_state()


@pytest.fixture(scope="module")
def session(pair: ModelPair) -> _core.Sequence:
    return pair.session(_core.h2o_policy(12, 4))


def _replaced(state: bytes, offset: int, value: bytes) -> bytes:
    return state[:offset] + value + state[offset + len(value) :]


def _slot_fields(**fields: int) -> Callable[[bytes], bytes]:
    """The state with other counts in its first slot."""

    def change(state: bytes) -> bytes:
        names = ("n_memory", "chunk_begin", "n_scored")
        values = SLOT_HEADER.unpack_from(state, SESSION_HEADER.size)
        values = tuple(fields.get(name, value) for name, value in zip(names, values, strict=True))
        return _replaced(state, SESSION_HEADER.size, SLOT_HEADER.pack(*values))

    return change


def _first_memory(*positions: int) -> Callable[[bytes], bytes]:
    offset = SESSION_HEADER.size + SLOT_HEADER.size
    return lambda state: _replaced(state, offset, struct.pack(f"<{len(positions)}i", *positions))


def _first_score(score: float) -> Callable[[bytes], bytes]:
    def change(state: bytes) -> bytes:
        n_memory = SLOT_HEADER.unpack_from(state, SESSION_HEADER.size)[0]
        offset = SESSION_HEADER.size + SLOT_HEADER.size + 4 * n_memory
        return _replaced(state, offset, struct.pack("<f", score))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: b"", "ends after 0 bytes"),
        (lambda state: state + b"\0", "1 bytes too many"),
        (lambda state: _replaced(state, 0, struct.pack("<Q", 2**63)), "the number of tokens is"),
        (lambda state: _replaced(state, 0, struct.pack("<q", -1)), "the number of tokens is"),
        (lambda state: _replaced(state, 0, struct.pack("<Q", MAX_CONTEXT + 1)), "at most 640"),
        (lambda state: _replaced(state, 0, struct.pack("<Q", 10)), "the end of the prompt is 212"),
        (
            lambda state: _replaced(state, 0, struct.pack("<QQ", 100, 100)),
            "the begin of a chunk is 192",
        ),
        (_slot_fields(n_memory=17), "the size of a memory set is 17, at most 16"),
        (_slot_fields(n_memory=2**64 - 1), "the size of a memory set"),
        (_slot_fields(chunk_begin=1000), "the begin of a chunk is 1000"),
        (_slot_fields(chunk_begin=3), "lie before the chunk at 3"),
        (_slot_fields(n_scored=2**62), "the number of scores"),
        (_first_memory(-1), "position -1"),
        (_first_memory(5, 5), "position 5 after 5"),
        (_first_memory(9, 4), "position 4 after 9"),
        (_first_score(float("nan")), "not a finite number"),
        (_first_score(-1.0), "not a finite number"),
    ],
)
def test_bad_states(
    session: _core.Sequence, saved: bytes, change: Callable[[bytes], bytes], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        session.load_state(change(saved))
    assert session.position == 0


def test_a_state_cut_at_any_byte_is_refused(session: _core.Sequence, saved: bytes) -> None:
    for length in range(len(saved)):
        with pytest.raises(ValueError, match="ends after"):
            session.load_state(saved[:length])


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_byte_never_breaks_the_session(
    session: _core.Sequence, saved: bytes, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    offset = int(rng.integers(len(saved)))
    try:
        session.load_state(_replaced(saved, offset, rng.bytes(1)))
    except ValueError:
        assert session.position == 0
    session.prefill(random_tokens(2 * CHUNK_SIZE), is_last=False)
    assert session.row_logits(0, 1).shape == (1, VOCAB_SIZE)


def test_a_state_of_another_policy_is_refused(pair: ModelPair, saved: bytes) -> None:
    for policy in (_core.h2o_policy(2, 2), _core.dense_policy()):
        with pytest.raises(ValueError, match=r"is 16, at most 4|bytes too many"):
            pair.session(policy).load_state(saved)


def test_what_cannot_be_saved_says_so(pair: ModelPair) -> None:
    class Rule:
        def select_memory(self, *_: object) -> list[int]:
            return []

    session = pair.session(_core.python_policy(Rule()))
    with pytest.raises(ValueError, match=r"a rule in Python.*cannot be saved"):
        session.save_state()

    def fail(done: int, total: int) -> None:
        raise RuntimeError

    session = pair.session(_core.dense_policy())
    with pytest.raises(RuntimeError):
        session.prefill(random_tokens(3), is_last=False, on_layer=fail)
    with pytest.raises(ValueError, match="interrupted"):
        session.save_state()


def test_a_state_with_gaps_is_refused(session: _core.Sequence, saved: bytes) -> None:
    with pytest.raises(ValueError, match="contiguous bytes"):
        session.load_state(memoryview(saved)[::-1])

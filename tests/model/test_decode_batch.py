"""Several tokens of one decode call: bit for bit what single calls give, and what is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.runners.native import NativeModelFile
from tests.model.golden_cases import CASES, SHAPE
from tests.model.model_pair import CHUNK_SIZE, random_tokens
from tests.tiny_models import TinyModelFactory

MAX_CONTEXT = 640
N_PROMPT = 230  # the first of the ranges of 256 keys ends within the decoded tokens
TOKENS = random_tokens(64, seed=5)


@pytest.fixture(params=_core.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Runs the test with each instruction set; models are packed for it."""
    _core.use_isa(request.param)
    return request.param


class EveryThird:
    """A rule that lists positions, others for every token."""

    def select_memory(self, layer: int, kv_head: int, chunk: Any, *_: Any) -> np.ndarray:
        return np.arange(chunk[0], dtype=np.int32)

    def select_decode(self, layer: int, kv_head: int, chunk: Any, *_: Any) -> np.ndarray:
        return np.arange((chunk[0] + kv_head) % 3, chunk[0], 3, dtype=np.int32)


def _policy(attention: str, n_slots: int) -> _core.SparsePolicy:
    if attention == "headwise":
        budgets = [24, None, 50] * n_slots
        sizes = {"local": 8, "page_size": 16, "decode_from": 100, "decode_pages": 16}
        return _core.headwise_policy(budgets[:n_slots], **sizes)
    if attention == "listed":
        return _core.python_policy(EveryThird())
    if attention == "h2o":
        return _core.h2o_policy(12, 4)
    return _core.dense_policy()


def _load(tiny_model: TinyModelFactory, **options: Any) -> _core.Model:
    with NativeModelFile(tiny_model(**{"n_layers": 2, **options})) as file:
        return file.load()._core_model


def _start(
    model: _core.Model, attention: str = "dense", n_slots: int = 4, **options: Any
) -> _core.Sequence:
    sizes = {"max_context": MAX_CONTEXT, "batch_size": 256, "chunk_size": CHUNK_SIZE} | options
    sequence = _core.Sequence(model, _policy(attention, n_slots), **sizes)
    sequence.prefill(random_tokens(N_PROMPT), is_last=True)
    return sequence


def _decode_singly(sequence: _core.Sequence, tokens: np.ndarray) -> np.ndarray:
    return np.stack([sequence.decode(int(token)) for token in tokens])


def _decode_together(sequence: _core.Sequence, tokens: np.ndarray, sizes: list[int]) -> np.ndarray:
    parts = []
    for part in np.split(tokens, np.cumsum(sizes)):
        if len(part):
            parts.append(sequence.decode_batch(part))
            sequence.accept(len(part) - 1)
    return np.concatenate(parts)


def _require_equal(
    model: _core.Model, attention: str = "dense", sizes: tuple[int, ...] = (), **options: Any
) -> None:
    singly, together = (_start(model, attention, **options) for _ in range(2))
    expected = _decode_singly(singly, TOKENS)
    logits = _decode_together(together, TOKENS, list(sizes or (16, 1, 2, 7, 16, 3, 5)))
    np.testing.assert_array_equal(logits, expected)
    assert together.token_ids == singly.token_ids
    for rows, others in zip(together.cached_rows(), singly.cached_rows(), strict=True):
        np.testing.assert_array_equal(rows, others)


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0", "q8_0/f16"])
@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0", "Q6_K"])
def test_equals_single_calls_bit_by_bit(
    tiny_model: TinyModelFactory, isa: str, tensor_type: str, cache_type: str
) -> None:
    _require_equal(_load(tiny_model, tensor_type=tensor_type), cache_type=cache_type)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (6, 2), (5, 1), (8, 2)])
@pytest.mark.parametrize("attention", ["dense", "h2o", "headwise", "listed"])
def test_equals_single_calls_with_every_group(
    tiny_model: TinyModelFactory, isa: str, attention: str, n_heads: int, n_kv_heads: int
) -> None:
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "model_dim": 64, "head_dim": 24}
    model = _load(tiny_model, n_layers=1, **heads, ffn_dim=64)
    _require_equal(model, attention, n_slots=n_kv_heads)
    _require_equal(model, attention, sizes=(4,) * 15, n_slots=n_kv_heads)


@pytest.mark.parametrize("case", CASES)
def test_equals_single_calls_in_every_architecture(tiny_model: TinyModelFactory, case: str) -> None:
    _require_equal(_load(tiny_model, **{**SHAPE, **CASES[case]}))


@pytest.mark.parametrize("attention", ["dense", "headwise"])
def test_does_not_depend_on_threads(tiny_model: TinyModelFactory, attention: str) -> None:
    model = _load(tiny_model, tensor_type="Q4_0")
    results = [
        _decode_together(_start(model, attention, threads=threads), TOKENS[:25], [16, 9])
        for threads in (1, 2, 3)
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("attention", ["dense", "h2o", "headwise"])
def test_tokens_that_are_not_accepted_leave_nothing(
    tiny_model: TinyModelFactory, attention: str
) -> None:
    """Also for a later turn, whose choices go by scores and by landmarks."""
    model = _load(tiny_model)
    tidy, hasty = (_start(model, attention) for _ in range(2))
    for sequence in (tidy, hasty):
        sequence.reset()
        sequence.prefill(random_tokens(N_PROMPT), is_last=True, stays_open=True)
    expected, wrong = _decode_singly(tidy, TOKENS[:10]), random_tokens(64, seed=6)
    rows = []
    for i in range(0, 10, 2):
        logits = hasty.decode_batch(np.concatenate([TOKENS[i : i + 2], wrong[:9]]))
        assert hasty.token_ids == tidy.token_ids[: N_PROMPT + i + 1]
        hasty.accept(1)
        rows += [logits[0], logits[1]]
    np.testing.assert_array_equal(np.stack(rows), expected)
    assert hasty.save_state() == tidy.save_state()
    np.testing.assert_array_equal(
        hasty.prefill(random_tokens(150, seed=9), is_last=True),
        tidy.prefill(random_tokens(150, seed=9), is_last=True),
    )


@pytest.mark.parametrize("forget", ["decode", "prefill", "rewind", "reset", "load_state"])
def test_every_other_call_forgets_them(tiny_model: TinyModelFactory, forget: str) -> None:
    sequence = _start(_load(tiny_model))
    sequence.decode_batch(TOKENS[:5])
    sequence.accept(1)
    state, tokens = sequence.save_state(), sequence.token_ids
    calls = {
        "decode": lambda: sequence.decode(3),
        "prefill": lambda: sequence.prefill(TOKENS, is_last=False),
        "rewind": lambda: sequence.rewind(N_PROMPT),
        "reset": sequence.reset,
        "load_state": lambda: sequence.load_state(state, tokens),
    }
    calls[forget]()
    with pytest.raises(ValueError, match="cannot accept 1 tokens: the last call left 0"):
        sequence.accept(1)


def test_calls_that_cannot_be_made_change_nothing(tiny_model: TinyModelFactory) -> None:
    model = _load(tiny_model)
    sequence = _start(model, max_context=N_PROMPT + 6)
    before = sequence.save_state(), [rows.copy() for rows in sequence.cached_rows()]
    for tokens, message in [
        (TOKENS[:7], "plus 7 tokens exceeds the context of 236"),
        (TOKENS[:17], "a decode call takes 1 to 16 tokens, got 17"),
        (TOKENS[:0], "1 to"),
        (np.array([1, 320], np.int32), "token 320 is outside the vocabulary"),
        (TOKENS[:4].reshape(2, 2), "one-dimensional"),
    ]:
        with pytest.raises(ValueError, match=message):
            sequence.decode_batch(tokens)
    assert sequence.save_state() == before[0]
    for rows, old in zip(sequence.cached_rows(), before[1], strict=True):
        np.testing.assert_array_equal(rows, old)
    assert sequence.decode_batch(TOKENS[:6]).shape == (6, sequence.vocab_size)
    with pytest.raises(ValueError, match="cannot accept 6 tokens: the last call left 5"):
        sequence.accept(6)
    sequence.accept(5)
    assert sequence.position == sequence.max_context
    small = _core.Sequence(model, _core.dense_policy(), max_context=64, batch_size=4, chunk_size=4)
    assert small.max_decode_tokens == 4
    with pytest.raises(ValueError, match="1 to 4 tokens, got 5"):
        small.decode_batch(TOKENS[:5])


def test_whole_past_in_python_equals_no_rule(tiny_model: TinyModelFactory) -> None:
    class Everything(EveryThird):
        def select_decode(self, layer: int, kv_head: int, chunk: Any, *_: Any) -> np.ndarray:
            return np.arange(chunk[0], dtype=np.int32)

    model = _load(tiny_model)
    sizes = {"max_context": MAX_CONTEXT, "batch_size": 256, "chunk_size": CHUNK_SIZE}
    logits = []
    for policy in (_core.python_policy(Everything()), _core.dense_policy()):
        sequence = _core.Sequence(model, policy, **sizes)
        sequence.prefill(random_tokens(N_PROMPT), is_last=True)
        logits.append(_decode_together(sequence, TOKENS, [16, 16, 16]))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("attention", ["dense", "headwise"])
def test_a_saved_prompt_goes_on_bit_by_bit(tiny_model: TinyModelFactory, attention: str) -> None:
    """What generated tokens read of it is chosen again, and is the same."""
    first, second = (_start(_load(tiny_model), attention) for _ in range(2))
    _decode_singly(first, TOKENS[:20])
    second.load_state(first.save_state(), first.token_ids)
    for rows, copy in zip(first.cached_rows(), second.cached_rows(), strict=True):
        copy[:] = rows
    np.testing.assert_array_equal(
        _decode_singly(second, TOKENS[20:40]), _decode_singly(first, TOKENS[20:40])
    )
    first.rewind(N_PROMPT + 3)
    second.rewind(N_PROMPT + 3)
    np.testing.assert_array_equal(
        _decode_singly(second, TOKENS[:9]), _decode_together(first, TOKENS[:9], [4, 5])
    )


def test_headwise_decode_reads_less(tiny_model: TinyModelFactory) -> None:
    model = _load(tiny_model)
    dense, sparse = (_start(model, name) for name in ("dense", "headwise"))
    assert sparse.memory_bytes["kv_cache"] > dense.memory_bytes["kv_cache"]
    logits = [_decode_singly(sequence, TOKENS[:4]) for sequence in (dense, sparse)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3

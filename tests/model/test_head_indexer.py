"""Indexers that choose blocks of tokens for every KV head (minimax-m3)."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _core
from tests.model.indexed_blocks import BLOCK, KEY_DIM, N_TOKENS, ROW_DIM, TOP_K
from tests.model.model_pair import (
    CHUNK_SIZE,
    MAX_CONTEXT,
    clear_prompt,
    decode_noting_reads,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
)
from tests.tiny_models import TinyModelFactory

SHAPE: dict[str, object] = {
    **{"architecture": "minimax-m3", "n_layers": 2, "model_dim": 64, "n_heads": 4},
    **{"n_kv_heads": 2, "head_dim": 16, "ffn_dim": 32, "n_experts": 3},
}


def test_what_fits_is_all_read(tiny_model: TinyModelFactory) -> None:
    """By rows as far as so many tokens, and by all rows of a model whose indexers read more."""
    pair = load_pair(tiny_model, **SHAPE)
    large = load_pair(tiny_model, **SHAPE, index_top_k=4 * N_TOKENS)
    tokens = clear_prompt(pair, N_TOKENS)
    chosen, all_read = (
        prefill(each.session(_core.dense_policy(), cache_type="f32"), tokens)
        for each in (pair, large)
    )
    assert relative_error(chosen[:TOP_K], all_read[:TOP_K]) < 1e-6
    assert relative_error(chosen[TOP_K:], all_read[TOP_K:]) > 0.02


@pytest.mark.parametrize("n", [TOP_K - 2, TOP_K - 1, TOP_K, N_TOKENS - 4, N_TOKENS - 1])
@pytest.mark.parametrize("n_local", [0, 2])
def test_generated_tokens_read_what_was_chosen(
    tiny_model: TinyModelFactory, n: int, n_local: int
) -> None:
    """Of every KV head its own blocks, and the last ones of both."""
    pair = load_pair(tiny_model, **SHAPE, index_local_blocks=n_local)
    tokens = clear_prompt(pair, N_TOKENS)
    run, (_, _, first, second) = decode_noting_reads(pair, tokens, n)
    (expected,) = run.chosen_by_head
    for read, wanted in zip((first, second), expected, strict=True):
        np.testing.assert_array_equal(read, wanted)
        assert len(read) <= min(n + 1, TOP_K)
        last = max((n // BLOCK + 1 - n_local) * BLOCK, 0) if n_local else n + 1
        assert set(range(last, n + 1)) <= set(read.tolist())
    assert (n < TOP_K) == (len(first) == n + 1)
    if n == N_TOKENS - 1:
        assert first.tolist() != second.tolist()


def test_what_is_kept(tiny_model: TinyModelFactory) -> None:
    """A key of every token, in the layer that has an indexer; what a token reads is counted."""
    pair = load_pair(tiny_model, **SHAPE)
    session = pair.session(_core.dense_policy(), cache_type="f16")
    of_rows = 2 * MAX_CONTEXT * ROW_DIM * 2
    assert session.memory_bytes["kv_cache"] == of_rows + MAX_CONTEXT * KEY_DIM * 2
    session.prefill(random_tokens(N_TOKENS - 1), is_last=True)
    before = session.decode_bytes
    session.decode(5)
    read = TOP_K - BLOCK + (N_TOKENS - 1) % BLOCK + 1
    of_layers = N_TOKENS * ROW_DIM + N_TOKENS * KEY_DIM + read * ROW_DIM
    assert session.decode_bytes - before == 2 * of_layers


def test_threads_and_calls_change_nothing(tiny_model: TinyModelFactory) -> None:
    pair = load_pair(tiny_model, **SHAPE, tensor_type="Q4_0")
    tokens = random_tokens(N_TOKENS)
    sizes = {"max_context": MAX_CONTEXT, "batch_size": MAX_CONTEXT, "chunk_size": CHUNK_SIZE}

    def run(threads: int, *lengths: int) -> np.ndarray:
        workspace = _core.Workspace(pair.core, threads)
        session = _core.Sequence(pair.core, _core.dense_policy(), workspace=workspace, **sizes)
        for i, part in enumerate(np.split(tokens, np.cumsum(lengths)[:-1])):
            logits = session.prefill(part, is_last=i == len(lengths) - 1)
        return np.stack([logits, session.decode(5), session.decode(6)])

    expected = run(1, N_TOKENS)
    np.testing.assert_array_equal(run(3, N_TOKENS), expected)
    halves = (2 * CHUNK_SIZE, N_TOKENS - 2 * CHUNK_SIZE)
    np.testing.assert_array_equal(run(3, *halves), run(1, *halves))


def test_going_back(tiny_model: TinyModelFactory) -> None:
    """Guesses that do not count leave nothing behind."""
    pair = load_pair(tiny_model, **SHAPE)
    tokens, guesses = random_tokens(90), random_tokens(9, seed=3)
    session, fresh = (pair.session(_core.dense_policy(), all_rows=False) for _ in range(2))
    session.prefill(tokens, is_last=True)
    session.decode_batch(guesses)
    session.accept(0)
    fresh.prefill(tokens, is_last=True)
    fresh.decode(int(guesses[0]))
    for token in random_tokens(8, seed=7):
        np.testing.assert_array_equal(session.decode(int(token)), fresh.decode(int(token)))
    assert session.save_state() == fresh.save_state()

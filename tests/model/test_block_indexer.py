"""Indexers that score blocks of tokens, beside plain attention (qwen4exp)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.cli.main import main
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
    **{"architecture": "qwen4exp", "n_layers": 4, "model_dim": 64, "n_heads": 4, "n_kv_heads": 2},
    **{"head_dim": 16, "ffn_dim": 32, "n_experts": 3},
}


def test_what_fits_is_all_read(tiny_model: TinyModelFactory) -> None:
    """As by the same layers without indexers: blocks and up to three tokens behind the last."""
    pair = load_pair(tiny_model, **SHAPE)
    dense = load_pair(tiny_model, **SHAPE, index_block_tokens=0)
    large = load_pair(tiny_model, **SHAPE, index_top_k=4 * N_TOKENS)
    tokens = clear_prompt(pair, N_TOKENS)
    expected, chosen, all_read = (
        prefill(each.session(_core.dense_policy(), cache_type="f32"), tokens)
        for each in (dense, pair, large)
    )
    most = TOP_K + BLOCK - 1
    assert relative_error(all_read, expected) < 1e-6
    assert relative_error(chosen[:most], expected[:most]) < 1e-6
    assert relative_error(chosen[most:], expected[most:]) > 0.05


@pytest.mark.parametrize("n", [TOP_K - 2, TOP_K + 3, N_TOKENS - 4, N_TOKENS - 3, N_TOKENS - 1])
def test_generated_tokens_read_what_was_chosen(tiny_model: TinyModelFactory, n: int) -> None:
    """Whole blocks, and what lies behind the last of them: the same in both KV heads."""
    pair = load_pair(tiny_model, **SHAPE)
    tokens = clear_prompt(pair, N_TOKENS)
    run, (first, same, last, also) = decode_noting_reads(pair, tokens, n)
    np.testing.assert_array_equal(last, run.chosen[0])
    np.testing.assert_array_equal(last, also)
    np.testing.assert_array_equal(first, same)
    n_behind = (n + 1) % BLOCK
    assert len(last) == min(n + 1, TOP_K + n_behind)
    assert list(last[len(last) - n_behind :]) == list(range(n + 1 - n_behind, n + 1))
    assert np.all(last[: len(last) - n_behind].reshape(-1, BLOCK)[:, 0] % BLOCK == 0)


def test_what_is_kept(tiny_model: TinyModelFactory) -> None:
    """Keys of tokens, and of blocks where some are chosen."""
    for top_k, n_keys in ((TOP_K, MAX_CONTEXT + MAX_CONTEXT // BLOCK), (MAX_CONTEXT, MAX_CONTEXT)):
        pair = load_pair(tiny_model, **SHAPE, index_top_k=top_k)
        session = pair.session(_core.dense_policy(), cache_type="f16")
        of_rows = 2 * MAX_CONTEXT * ROW_DIM * 2
        assert session.memory_bytes["kv_cache"] == of_rows + 2 * n_keys * KEY_DIM * 2
    session = load_pair(tiny_model, **SHAPE).session(_core.dense_policy(), cache_type="f16")
    session.prefill(random_tokens(N_TOKENS), is_last=True)
    before = session.decode_bytes
    session.decode(5)
    n_blocks, n_behind = divmod(N_TOKENS + 1, BLOCK)
    of_layer = n_blocks * KEY_DIM + (TOP_K + n_behind) * ROW_DIM
    assert session.decode_bytes - before == 2 * 2 * of_layer


def test_going_back_into_a_block(tiny_model: TinyModelFactory) -> None:
    """Guesses that do not count leave no key of a block behind, and other tokens make another."""
    pair = load_pair(tiny_model, **SHAPE)
    tokens, other = random_tokens(90), random_tokens(8, seed=7)
    session, fresh = (pair.session(_core.dense_policy(), all_rows=False) for _ in range(2))
    session.prefill(tokens, is_last=True)
    wrong = session.decode_batch(random_tokens(9, seed=3))
    assert len(wrong) == 9
    session.accept(0)
    fresh.prefill(tokens, is_last=True)
    fresh.decode(int(random_tokens(9, seed=3)[0]))
    for token in other:
        np.testing.assert_array_equal(session.decode(int(token)), fresh.decode(int(token)))
    assert session.save_state() == fresh.save_state()


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


def test_rules_beside_it_are_refused_by_name(
    tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tiny_model(**SHAPE, context_length=512))
    flags = ["-p", "the art of war " * 40, "-n", "4", "--temp", "0"]
    assert main(["run", path, *flags, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["attention"] == {"algorithm": "dense", "indexer_top_k": TOP_K}
    assert main(["run", path, *flags, "--attention", "h2o"]) == 2
    message = capsys.readouterr().err
    assert "queries of this model (qwen4exp) read what its own indexer chooses" in message
    assert main(["run", path, *flags, "-n", "600", "-c", "512", "--context-full", "evict"]) == 2
    assert "its own indexer chooses" in capsys.readouterr().err
    assert main(["export-onnx", path, str(tmp_path / "folder")]) == 1
    assert "cannot be written" in capsys.readouterr().err

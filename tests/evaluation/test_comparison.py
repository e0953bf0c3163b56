"""Token scores against float64 NumPy, and that a window is read densely no more than needed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeh2o import LLM, DenseConfig, H2OConfig, PrefillConfig
from edgeh2o.evaluation import comparison
from edgeh2o.evaluation.comparison import (
    TokenScores,
    WindowComparer,
    compare_logits,
    score_window,
)
from tests.evaluation.counted import CountingRunner
from tests.evaluation.loaded import TEXT, WINDOW, load
from tests.tiny_models import TinyModelFactory

Float = NDArray[np.float64]


def reference_scores(
    dense: NDArray[np.floating], sparse: NDArray[np.floating], targets: NDArray[np.int32]
) -> TokenScores:
    """The definitions in float64."""

    def log_softmax(logits: NDArray[np.floating]) -> Float:
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        normalised: Float = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return normalised

    p, q = log_softmax(dense), log_softmax(sparse)
    index = np.arange(len(targets))
    return TokenScores(
        dense_nll=-p[index, targets],
        sparse_nll=-q[index, targets],
        kl=(np.exp(p) * (p - q)).sum(axis=1),
        agrees=(p.argmax(axis=1) == q.argmax(axis=1)).astype(np.float64),
    )


def assert_close(scores: TokenScores, expected: TokenScores, tolerance: float) -> None:
    for name in ("dense_nll", "sparse_nll", "kl", "agrees"):
        values, wanted = getattr(scores, name), getattr(expected, name)
        assert values.dtype == np.float64
        np.testing.assert_allclose(values, wanted, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("n_rows", [1, 3, 4, 9])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_scores_equal_the_definitions(n_rows: int, scale: float) -> None:
    rng = np.random.default_rng(n_rows)
    dense = (50 + scale * rng.normal(size=(n_rows, 1000))).astype(np.float32)
    sparse = (dense + scale * 0.1 * rng.normal(size=dense.shape)).astype(np.float32)
    targets = rng.integers(0, 1000, n_rows).astype(np.int32)
    originals = dense.copy(), sparse.copy()
    scores = compare_logits(dense, sparse, targets)
    assert_close(scores, reference_scores(dense, sparse, targets), 2e-6)
    np.testing.assert_array_equal((dense, sparse), originals)


def test_equal_logits_have_no_divergence_at_all() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 333)).astype(np.float32)
    scores = compare_logits(logits, logits.copy(), np.arange(5, dtype=np.int32))
    assert not scores.kl.any()
    assert scores.agrees.all()
    np.testing.assert_array_equal(scores.dense_nll, scores.sparse_nll)


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    with load(tiny_model(tensor_type="F32")) as loaded:
        yield loaded


@pytest.mark.parametrize("n_tokens", [WINDOW, WINDOW - 7, 33])
@pytest.mark.parametrize("block_rows", [128, 5])
def test_a_window_in_blocks_equals_one_in_one_piece(
    llm: LLM, n_tokens: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "BLOCK_ROWS", block_rows)
    window = np.array(llm.tokenize(TEXT)[:n_tokens], np.int32)
    whole = PrefillConfig(batch_size=WINDOW, chunk_size=16)
    logits = []
    for attention in (DenseConfig(), H2OConfig(local=4, heavy=4)):
        runner = llm.start_runner(WINDOW, attention=attention, prefill=whole, all_rows=True)
        runner.prefill(window, is_last=True)
        logits.append(runner.row_logits(0, n_tokens)[:-1])
    expected = reference_scores(logits[0], logits[1], window[1:])

    counted: list[int] = []
    comparer = WindowComparer(llm.start_runner(WINDOW, attention=DenseConfig(), all_rows=True))
    scores = comparer.compare(
        llm.start_runner(WINDOW, all_rows=True), window, on_tokens=counted.append
    )
    assert len(scores) == n_tokens - 1
    assert_close(scores, expected, 1e-4)
    assert expected.kl[16:].max() > 1e-2, "the case must tell sparse from dense"
    assert sum(counted) == n_tokens


def test_a_window_of_one_batch_is_read_densely_once(llm: LLM) -> None:
    whole = PrefillConfig(batch_size=WINDOW, chunk_size=16)
    dense = llm.start_runner(WINDOW, attention=DenseConfig(), prefill=whole, all_rows=True)
    others = [
        llm.start_runner(
            WINDOW, attention=H2OConfig(local=n, heavy=n), prefill=whole, all_rows=True
        )
        for n in (2, 4)
    ]
    tokens = np.array(llm.tokenize(TEXT), np.int32)
    reads: list[int] = []
    comparer = WindowComparer(CountingRunner(dense, reads))
    windows = [tokens[:WINDOW], tokens[5 : WINDOW + 5]]
    scores = [comparer.compare(other, window) for window in windows for other in others]
    assert reads == [WINDOW, WINDOW]
    fresh = WindowComparer(
        llm.start_runner(WINDOW, attention=DenseConfig(), prefill=whole, all_rows=True)
    )
    assert_close(fresh.compare(others[1], windows[1]), scores[3], 1e-12)


@pytest.mark.parametrize(("first", "n_reads"), [(40, 3), (32, 3), (31, 6)])
def test_so_is_one_whose_last_batch_alone_is_scored(llm: LLM, first: int, n_reads: int) -> None:
    batches = PrefillConfig(batch_size=16, chunk_size=16)
    window = np.array(llm.tokenize(TEXT)[:48], np.int32)
    dense, again, *others = (
        llm.start_runner(48, attention=each, prefill=batches, all_rows=True)
        for each in (DenseConfig(), DenseConfig(), *(H2OConfig(local=n, heavy=n) for n in (2, 4)))
    )
    reads: list[int] = []
    comparer = WindowComparer(CountingRunner(dense, reads))
    for other in others:
        scores = comparer.compare(other, window, first=first)
        assert_close(scores, WindowComparer(again).compare(other, window).part(first, 47), 0)
    assert len(reads) == n_reads


@pytest.mark.parametrize("first", [0, 7, 40])
def test_a_window_alone_has_the_scores_of_a_comparison(llm: LLM, first: int) -> None:
    batches = PrefillConfig(batch_size=16, chunk_size=16)
    window = np.array(llm.tokenize(TEXT)[:48], np.int32)
    dense, sparse = (
        llm.start_runner(48, attention=each, prefill=batches, all_rows=True)
        for each in (DenseConfig(), H2OConfig(local=4, heavy=4))
    )
    scores = WindowComparer(dense).compare(sparse, window, first=first)
    np.testing.assert_array_equal(score_window(dense, window, first=first), scores.dense_nll)
    np.testing.assert_array_equal(score_window(sparse, window, first=first), scores.sparse_nll)


def test_a_window_that_was_scored_is_held(llm: LLM) -> None:
    batches = PrefillConfig(batch_size=16, chunk_size=16)
    window = np.array(llm.tokenize(TEXT)[:48], np.int32)
    dense, sparse = (
        llm.start_runner(48, attention=each, prefill=batches, all_rows=True)
        for each in (DenseConfig(), H2OConfig(local=4, heavy=4))
    )
    expected = WindowComparer(dense).compare(sparse, window, first=32)
    reads: list[int] = []
    layers: list[int] = []
    comparer = WindowComparer(CountingRunner(dense, reads))
    assert not comparer.holds(window)
    nll = comparer.score(window, first=32, on_layer=lambda layer, _: layers.append(layer))
    np.testing.assert_array_equal(nll, expected.dense_nll)
    assert comparer.holds(window) and not comparer.holds(window[1:])
    assert_close(comparer.compare(sparse, window, first=32), expected, 0)
    assert (len(reads), len(layers)) == (3, 3 * llm.config.n_layers)

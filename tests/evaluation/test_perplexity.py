"""The report against sums over the token scores, windows as llama-perplexity cuts them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, UsageError
from edgeh2o.evaluation.comparison import TokenScores, WindowComparer, join_scores
from edgeh2o.evaluation.perplexity import (
    evaluate_perplexity,
    summarise_parts,
    summarise_ranges,
)
from edgeh2o.evaluation.windows import cut_windows, scored_ranges
from tests.evaluation.loaded import TEXT, WINDOW, load
from tests.tiny_models import TinyModelFactory


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    with load(tiny_model(tensor_type="Q8_0")) as loaded:
        yield loaded


def test_windows_follow_each_other(llm: LLM) -> None:
    tokens = llm.tokenize(TEXT, parse_special=False)
    windows = cut_windows(llm, TEXT, 50, 3)
    assert windows.dtype == np.int32
    np.testing.assert_array_equal(windows.ravel(), tokens[:150])
    assert len(cut_windows(llm, TEXT, 50, None)) == len(tokens) // 50


def test_control_tokens_in_the_text_are_taken_literally(llm: LLM) -> None:
    text = "<|im_end|>" * 10
    assert llm.tokenize("<|im_end|>")[0] not in cut_windows(llm, text, 20, 1)


def test_every_window_begins_as_the_models_prompts_do(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = cut_windows(llm, TEXT, 50, 3)
    tokenizer = llm.model.tokenizer
    encode = tokenizer.encode

    def encode_with_bos(text: str, *, add_special: bool = True, **options: bool) -> list[int]:
        return [1] * add_special + encode(text, add_special=False, **options)

    monkeypatch.setattr(tokenizer, "encode", encode_with_bos)
    windows = cut_windows(llm, TEXT, 50, 3)
    assert (windows[:, 0] == 1).all()
    stream = np.concatenate([[1], plain.ravel()])[: plain.size].reshape(plain.shape)
    np.testing.assert_array_equal(windows[:, 1:], stream[:, 1:])


def test_the_error_of_a_single_token_is_not_known() -> None:
    scores = TokenScores(*(np.array([0.5]) for _ in range(4)))
    (quality,) = summarise_parts([scores], {"one": (0, 1)})
    assert quality.kl == 0.5
    assert np.isnan([quality.kl_error, quality.loss_percent_error]).all()


@pytest.mark.parametrize(
    ("size", "count", "message"),
    [
        (2, 1, "at least 3 tokens, got 2"),
        (50, 0, "at least 1, got 0"),
        (50, 1000, r"too few for 1000 windows of 50"),
        (100_000, None, r"too few for a window of 100000"),
    ],
)
def test_windows_that_cannot_be_cut_are_refused(
    llm: LLM, size: int, count: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        cut_windows(llm, TEXT, size, count)


def test_ranges_count_predicted_tokens() -> None:
    assert dict(scored_ranges(4096, 1024)) == {
        "all": (0, 4095),
        "after 1024": (1024, 4095),
        "last 1024": (3071, 4095),
        "second half": (2048, 4095),
    }
    assert dict(scored_ranges(512, 1024)) == {"all": (0, 511), "second half": (256, 511)}
    assert dict(scored_ranges(3, 0)) == {"all": (0, 2)}


def test_means_and_errors_are_over_the_tokens_of_all_windows() -> None:
    rng = np.random.default_rng(0)
    windows = []
    for _ in range(2):
        dense, extra, kl = rng.random((3, 95))
        windows.append(
            TokenScores(dense + 2, dense + 2 + 0.1 * extra, kl, (kl < 0.7).astype(float))
        )
    qualities = {q.range: q for q in summarise_ranges(windows, WINDOW, 16)}
    assert set(qualities) == {"all", "after 16", "second half"}
    tail = join_scores([window.part(16, 95) for window in windows])
    quality = qualities["after 16"]
    n = 2 * 79
    assert quality.tokens == n
    assert quality.dense_perplexity == pytest.approx(np.exp(tail.dense_nll.mean()))
    assert quality.sparse_perplexity == pytest.approx(np.exp(tail.sparse_nll.mean()))
    ratio = quality.sparse_perplexity / quality.dense_perplexity
    assert quality.loss_percent == pytest.approx(100 * (ratio - 1))
    paired = np.std(tail.sparse_nll - tail.dense_nll, ddof=1) / np.sqrt(n)
    assert quality.loss_percent_error == pytest.approx(100 * ratio * paired)
    assert quality.dense_perplexity_error == pytest.approx(
        quality.dense_perplexity * np.std(tail.dense_nll, ddof=1) / np.sqrt(n)
    )
    assert quality.kl == pytest.approx(tail.kl.mean())
    assert quality.kl_error == pytest.approx(np.std(tail.kl, ddof=1) / np.sqrt(n))
    assert quality.top1_percent == pytest.approx(100 * tail.agrees.mean())


def test_report_sums_windows_and_pairs(llm: LLM) -> None:
    progress: list[tuple[str, int, int]] = []
    report = evaluate_perplexity(
        llm,
        TEXT,
        context_size=WINDOW,
        windows=2,
        skip=16,
        on_progress=lambda *step: progress.append(step),
    )
    comparer = WindowComparer(llm.start_runner(WINDOW, attention=DenseConfig(), all_rows=True))
    sparse = llm.start_runner(WINDOW, all_rows=True)
    scores = [comparer.compare(sparse, window) for window in cut_windows(llm, TEXT, WINDOW, 2)]
    assert report.ranges == summarise_ranges(scores, WINDOW, 16)
    assert report.windows[1] == summarise_ranges(scores[1:], WINDOW, 16)
    assert report.pairs_dense == 2 * WINDOW * (WINDOW + 1) // 2
    assert report.pairs_computed == 2 * sparse.pairs_computed < report.pairs_dense
    assert report.keys_per_query == sparse.pairs_computed / WINDOW
    assert progress[-1] == ("evaluate", 2 * WINDOW, 2 * WINDOW)
    assert [done for _, done, _ in progress] == list(range(32, 2 * WINDOW + 1, 32))
    records = report.to_records()
    assert [record["range"] for record in records] == ["all", "after 16", "second half"]
    assert records[0]["loss_percent"] == report.find("all").loss_percent
    with pytest.raises(KeyError):
        report.find("last 1024")


def test_dense_against_dense_is_no_loss(tiny_model: TinyModelFactory) -> None:
    with load(tiny_model(tensor_type="Q8_0"), DenseConfig()) as llm:
        report = evaluate_perplexity(llm, TEXT, context_size=WINDOW, windows=1)
    quality = report.find("all")
    assert (quality.loss_percent, quality.loss_percent_error, quality.kl) == (0, 0, 0)
    assert quality.top1_percent == 100
    assert report.pairs_computed == report.pairs_dense


def test_a_negative_skip_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="skip must be at least 0"):
        evaluate_perplexity(llm, TEXT, context_size=WINDOW, skip=-1)

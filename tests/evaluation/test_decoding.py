"""``perplexity --decode``: what a rule for generated tokens costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.config import PrefillConfig
from edgeh2o.errors import UsageError
from edgeh2o.evaluation.comparison import compare_logits
from edgeh2o.evaluation.decoding import (
    compare_decodes,
    decode_block,
    evaluate_decoding,
    start_decoders,
)
from edgeh2o.evaluation.long_texts import make_window
from edgeh2o.evaluation.reading import prefill_prompt
from edgeh2o.evaluation.suite import evaluate_suite
from edgeh2o.evaluation.windows import cut_windows
from edgeh2o.llm import LLM
from tests.evaluation.counted import CountingRunner
from tests.tiny_models import TinyModelFactory

CONTEXT, DECODED = 2200, 40
SPARSE = HeadwiseConfig(budget=64, local=32, decode_attention="headwise")


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    path = tiny_model(tensor_type="F32", n_layers=2, context_length=4096)
    with LLM(path, attention=SPARSE, prefill=PrefillConfig(batch_size=512, chunk_size=64)) as llm:
        yield llm


@pytest.fixture(scope="module")
def text() -> str:
    words = np.random.default_rng(0).choice(["the", "art", "of", "all", "things", "that"], 9000)
    return " ".join(words)


def test_compares_with_dense_decode_after_the_same_prefill(llm: LLM, text: str) -> None:
    reports: list[tuple[str, int, int]] = []
    report = evaluate_decoding(
        llm,
        text,
        DECODED,
        context_size=CONTEXT,
        windows=2,
        on_progress=lambda *report: reports.append(report),
    )
    assert reports[-1][1:] == (4 * CONTEXT, 4 * CONTEXT)
    decoded = report.find("decoded")
    assert decoded.tokens == 2 * (DECODED - 1)
    assert report.find("second half").tokens == 2 * 20
    window = cut_windows(llm, text, CONTEXT, 2)[0]
    logits = []
    for attention in (llm.attention.decoding_densely(), llm.attention):
        runner = llm.start_runner(CONTEXT, attention=attention)
        prefill_prompt(runner, window[:-DECODED])
        logits.append(np.stack([runner.decode(int(token)) for token in window[-DECODED:-1]]))
    expected = compare_logits(*logits, window[1 - DECODED :])
    assert report.windows[0][0].kl == pytest.approx(float(expected.kl.mean()))
    assert report.windows[0][0].kl > 1e-6
    assert report.attention["decode"] == "headwise"


def test_kinds_of_text_are_decoded(llm: LLM) -> None:
    seeds = (0, 1)
    report = evaluate_suite(
        llm, context_size=CONTEXT, kinds=("pairs", "facts"), seeds=seeds, n_decoded=DECODED
    )
    assert "the last 40 tokens decoded" in report.format_text().splitlines()[0]
    assert report.n_decoded == DECODED
    runners = start_decoders(llm, CONTEXT, CONTEXT)
    for kind in report.kinds:
        windows = [make_window(llm, kind.kind, CONTEXT, seed=seed) for seed in seeds]
        scores = [
            compare_decodes(runners, window, DECODED, on_tokens=lambda _: None)[0]
            for window in windows
        ]
        assert kind.tokens == 2 * (DECODED - 1)
        assert kind.kl == pytest.approx(np.mean([part.kl for part in scores]))
        assert kind.kl > 1e-6


@pytest.mark.parametrize("by_query_head", [False, True])
def test_a_prompt_that_is_shared_is_read_once(llm: LLM, by_query_head: bool) -> None:
    """What is decoded after it is, bit for bit, what is decoded after one of its own."""
    n_sets = llm.config.n_layers * (llm.config.n_heads if by_query_head else llm.config.n_kv_heads)
    dense = HeadwiseConfig(
        budgets=(64,) * n_sets, by_query_head=by_query_head, decode_attention="dense"
    )
    n_slots = llm.config.n_layers * llm.config.n_kv_heads
    rule = replace(
        dense, decode_attention="headwise", decode_budgets=(None, *(64,) * (n_slots - 1))
    )
    window, found = make_window(llm, "pairs", CONTEXT), []
    for shares_prompt in (False, True):
        reads: list[int] = []
        runners: list[Any] = [
            CountingRunner(llm.start_runner(CONTEXT, attention=each), reads)
            for each in (dense, rule)
        ]
        (scores,) = compare_decodes(
            runners, window, DECODED, on_tokens=lambda _: None, shares_prompt=shares_prompt
        )
        found.append(scores)
        assert sum(reads) == (CONTEXT - DECODED) * (1 if shares_prompt else 2)
    assert found[0].kl.mean() > 1e-6
    for item in ("dense_nll", "sparse_nll", "kl"):
        np.testing.assert_array_equal(getattr(found[0], item), getattr(found[1], item))


def test_short_prompts_are_decoded_densely(llm: LLM, text: str) -> None:
    report = evaluate_decoding(llm, text, DECODED, context_size=2048, windows=1)
    assert report.find("decoded").kl == pytest.approx(0, abs=1e-12)


def test_block_equals_tokens(llm: LLM) -> None:
    tokens = np.arange(5, 12, dtype=np.int32)
    runners = [llm.start_runner(64) for _ in range(2)]
    for runner in runners:
        prefill_prompt(runner, tokens)
    block = decode_block(runners[0], tokens)
    np.testing.assert_array_equal(block, [runners[1].decode(int(t)) for t in tokens])
    assert runners[0].position == runners[1].position


def test_what_cannot_be_compared(llm: LLM, text: str, tiny_model: TinyModelFactory) -> None:
    for n_decoded in (3, CONTEXT):
        with pytest.raises(UsageError, match=r"the tokens to decode \(--decode\) must be at least"):
            evaluate_decoding(llm, text, n_decoded, context_size=CONTEXT)
    with (
        LLM(llm.model_path, attention="dense") as dense,
        pytest.raises(UsageError, match="decodes densely: there is nothing to compare"),
    ):
        evaluate_decoding(dense, text, DECODED, context_size=CONTEXT)

"""Greedy texts after two prefills: where they part, what the first token's distribution loses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, H2OConfig, PrefillConfig, SamplingParams, UsageError
from edgeh2o.evaluation.agreement import (
    Agreement,
    AgreementReport,
    PromptAgreement,
    evaluate_agreement,
)
from edgeh2o.evaluation.windows import cut_windows
from tests.evaluation.loaded import TEXT, WINDOW, load
from tests.tiny_models import TinyModelFactory

N_TOKENS = 12


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    # F32 weights: no rounding of activations, so that texts part for the attention alone.
    with load(tiny_model(tensor_type="F32")) as loaded:
        yield loaded


def first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def test_texts_are_those_of_generate(llm: LLM, tiny_model: TinyModelFactory) -> None:
    steps: list[tuple[str, int, int]] = []
    report = evaluate_agreement(
        llm,
        TEXT,
        context_size=WINDOW,
        prompts=3,
        n_tokens=N_TOKENS,
        on_progress=lambda *step: steps.append(step),
    )
    assert steps == [("evaluate", done, 3) for done in (1, 2, 3)]
    greedy = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
    with load(tiny_model(tensor_type="F32"), DenseConfig()) as dense:
        for prompt, window in zip(
            report.sparse.prompts, cut_windows(llm, TEXT, WINDOW, 3), strict=True
        ):
            expected = dense.generate(window, greedy).token_ids
            n_equal = first_difference(expected, llm.generate(window, greedy).token_ids)
            assert prompt.n_equal == n_equal
            assert prompt.is_equal == (prompt.margin is None) == (n_equal == N_TOKENS)
            assert prompt.margin is None or prompt.margin >= 0
            assert prompt.first_kl > 0


def test_dense_in_other_chunks_is_the_floor(llm: LLM) -> None:
    report = evaluate_agreement(llm, TEXT, context_size=WINDOW, prompts=2, n_tokens=N_TOKENS)
    assert report.floor.attention == {"algorithm": "dense"}
    assert report.floor.chunk_size == report.sparse.chunk_size == 16
    assert all(prompt.is_equal for prompt in report.floor.prompts)
    assert max(prompt.first_kl for prompt in report.floor.prompts) < 1e-6


def test_the_floor_of_long_chunks_is_cut_differently(tiny_model: TinyModelFactory) -> None:
    with LLM(
        tiny_model(tensor_type="Q8_0"),
        attention=H2OConfig(local=4, heavy=4),
        prefill=PrefillConfig(batch_size=2048, chunk_size=1024),
    ) as llm:
        text = TEXT * 3
        report = evaluate_agreement(llm, text, context_size=640, prompts=1, n_tokens=1)
    # Chunks of 1,024 and of 512 round differently: were they cut alike, the KL would be 0.
    assert report.floor.prompts[0].first_kl != 0


def test_a_loss_of_position_shows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are shifted by one token for the attention under test agree with nothing."""
    from edgeh2o.evaluation import agreement

    continue_greedily = agreement._continue_greedily

    def rolled(*args: object) -> object:
        tokens, rows = continue_greedily(*args)  # type: ignore[arg-type]
        return [(token + 1) % rows.shape[1] for token in tokens], np.roll(rows, 1, axis=1)

    monkeypatch.setattr(agreement, "_continue_greedily", rolled)
    report = evaluate_agreement(llm, TEXT, context_size=WINDOW, prompts=2, n_tokens=3)
    for prompt in (*report.sparse.prompts, *report.floor.prompts):
        assert prompt.n_equal == 0
        assert prompt.margin is not None and prompt.margin > 0
        assert prompt.first_kl > 1e-3


def test_summary_and_formats() -> None:
    def prompt(n_equal: int, margin: float | None, kl: float) -> PromptAgreement:
        return PromptAgreement(n_tokens=10, n_equal=n_equal, margin=margin, first_kl=kl)

    sparse = Agreement(
        attention={"algorithm": "h2o", "local": 4},
        chunk_size=16,
        prompts=(prompt(10, None, 0.1), prompt(4, 0.5, 0.3), prompt(8, 0.1, 0.2)),
    )
    floor = Agreement(
        attention={"algorithm": "dense"}, chunk_size=16, prompts=(prompt(10, None, 0.0),) * 3
    )
    summary = sparse.summary()
    assert summary["equal_percent"] == pytest.approx(100 / 3)
    assert summary["equal_percent_error"] == pytest.approx(100 * np.sqrt(2 / 9 / 3))
    assert (summary["median_equal_tokens"], summary["median_margin"]) == (8, pytest.approx(0.3))
    assert summary["first_kl"] == pytest.approx(0.2)
    assert summary["first_kl_error"] == pytest.approx(0.1 / np.sqrt(3))
    assert floor.summary()["median_margin"] is None
    report = AgreementReport(model="m.gguf", context=64, n_tokens=10, sparse=sparse, floor=floor)
    assert [record["sparse_n_equal"] for record in report.to_records()] == [10, 4, 8]
    assert report.to_dict()["sparse"]["summary"] == summary
    cells = [cell.strip() for cell in report.format_text().splitlines()[-2].split("|")[1:-1]]
    assert cells == ["h2o local 4", "16", "33 +- 27", "8", "0.300", "0.20000 +- 0.05774"]


def test_no_token_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="at least 1, got 0"):
        evaluate_agreement(llm, TEXT, context_size=WINDOW, prompts=1, n_tokens=0)
    with pytest.raises(UsageError, match="too few for 999 windows"):
        evaluate_agreement(llm, TEXT, context_size=WINDOW, prompts=999)

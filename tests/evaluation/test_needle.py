"""Passkey prompts have the length and the place asked for; answers are scored by definition."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, UsageError
from edgeh2o.engine.generate import log_probability
from edgeh2o.evaluation import needle
from edgeh2o.evaluation.filler import filler_tokens, write_filler
from edgeh2o.evaluation.needle import NeedleGrid, evaluate_needle, place_needle
from edgeh2o.evaluation.reading import prefill_prompt
from tests.evaluation.loaded import TEXT, load
from tests.tiny_models import TinyModelFactory

GRID = NeedleGrid(lengths=(300, 400), depths=(0.0, 0.5, 1.0), places=("start", "end"))


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    with load(tiny_model(tensor_type="Q8_0")) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("depth", "place", "position"),
    [
        (0.0, "start", 10),  # the introduction takes the chunk's first 10 positions
        (0.0, "middle", 44),
        (0.0, "end", 88),
        (0.5, "start", 500),
        (0.5, "middle", 544),
        (0.5, "end", 588),
        (1.0, "start", 1000),
        (1.0, "end", 1010),  # the question follows
    ],
)
def test_depth_names_the_chunk_and_place_the_spot_in_it(
    depth: float, place: needle.Place, position: int
) -> None:
    placed = place_needle(depth, place, first=10, last=1010, size=12, chunk_size=100)
    assert placed == position


def test_prompts_have_the_asked_length_and_hold_the_passkey_once_asked(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    ask = needle._ask

    def record(runner: object, prompt: needle._Prompt) -> tuple[bool, float]:
        prompts.append(prompt)
        return ask(runner, prompt)

    monkeypatch.setattr(needle, "_ask", record)
    report = evaluate_needle(llm, GRID)
    assert len(prompts) == 2 * len(report.results) == 2 * 12
    assert len({result.passkey for result in report.results}) == 12
    for prompt, result in zip(prompts[::2], report.results, strict=True):
        assert len(prompt.tokens) == result.length
        text = llm.detokenize(prompt.tokens.tolist())
        assert text.startswith("There is a pass key")
        # The blank has a token of its own here, and belongs to the prompt.
        assert text.endswith("What is the pass key?\nThe pass key is ")
        assert llm.detokenize(prompt.answer) == result.passkey
        needle_text = llm.detokenize(prompt.tokens[result.position :].tolist())
        assert needle_text.startswith(f"\nThe pass key is {result.passkey}. Remember it.")
        if result.place == "start" and result.depth == 0.5:
            assert result.position % llm.prefill.chunk_size == 0


def test_scores_equal_a_decode_by_hand(llm: LLM) -> None:
    grid = NeedleGrid(lengths=(320,), depths=(0.3,), places=("middle",), seed=7)
    (result,) = evaluate_needle(llm, grid, filler=TEXT).results
    prompt = needle._PromptMaker(llm, 320, filler=TEXT, chat=False).make(320, 0.3, "middle", 7)
    for attention, logprob, exact in (
        (DenseConfig(), result.dense_logprob, result.dense_exact),
        (None, result.sparse_logprob, result.sparse_exact),
    ):
        runner = llm.start_runner(400, attention=attention)
        for first in range(0, 320, 32):
            logits = runner.prefill(prompt.tokens[first : first + 32], is_last=first == 288)
        expected, likely = [], []
        for token in prompt.answer:
            expected.append(log_probability(logits, token))
            likely.append(int(logits.argmax()))
            logits = runner.decode(token)
        assert logprob == pytest.approx(np.mean(expected), rel=1e-12)
        assert exact == (likely == prompt.answer)
    assert result.dense_logprob != result.sparse_logprob


def test_the_question_may_come_after_generated_tokens(llm: LLM) -> None:
    """The needle stands in what is read as the prompt; the rest is decoded token by token."""
    grid = NeedleGrid(lengths=(400,), depths=(1.0,), places=("end",), seed=7, generated=90)
    report = evaluate_needle(llm, grid, filler=TEXT)
    (result,) = report.results
    assert "asked 90 generated tokens after the prompt" in report.format_text().splitlines()[0]
    whole = needle._PromptMaker(llm, 400, filler=TEXT, chat=False).make(400, 1.0, "end", 7)
    prompt = needle._PromptMaker(llm, 400, filler=TEXT, chat=False).make(400, 1.0, "end", 7, 90)
    assert len(prompt.tokens) == len(whole.tokens) == 400
    assert result.position == prompt.position
    assert f"{result.passkey} is the pass key.\n" in llm.detokenize(prompt.read.tolist())
    n_question = len(prompt.tokens) - prompt.n_read - 90
    assert (prompt.tokens[-n_question:] == whole.tokens[-n_question:]).all()
    assert (whole.n_read, llm.detokenize(prompt.tokens[-n_question:].tolist())[:9]) == (
        400,
        "\n\nWhat is",
    )
    runner = llm.start_runner(400 + len(prompt.answer))
    logits = prefill_prompt(runner, prompt.read)
    for token in prompt.tokens[prompt.n_read :]:
        logits = runner.decode(int(token))
    logprobs = []
    for token in prompt.answer:
        logprobs.append(log_probability(logits, token))
        logits = runner.decode(int(token))
    assert result.sparse_logprob == pytest.approx(np.mean(logprobs))


def test_a_needle_and_generated_tokens_need_room(llm: LLM) -> None:
    grid = NeedleGrid(lengths=(400,), depths=(0.5,), places=("end",), generated=390)
    with pytest.raises(UsageError, match="no room for the 390 generated tokens, the needle and"):
        evaluate_needle(llm, grid)
    with pytest.raises(UsageError, match="generated must be an integer >= 0"):
        NeedleGrid(generated=-1)


def test_summary_counts_what_dense_solves(llm: LLM) -> None:
    report = evaluate_needle(llm, NeedleGrid(lengths=(300,), depths=(0.2, 0.8), places=("end",)))
    summary = report.summary()
    assert (summary["prompts"], summary["dense_exact"], summary["kept_fraction"]) == (2, 0, None)
    first = report.select(depth=0.2)
    assert first.summary()["dense_logprob"] == report.results[0].dense_logprob
    assert report.to_records()[1]["depth"] == 0.8
    assert report.format_text().count("\n| ") == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "at least one length"),
        ({"lengths": (0,)}, "at least 1 token"),
        ({"depths": (0.5, 1.5)}, "between 0 and 1, got 1.5"),
        ({"places": ("top",)}, "places are start, middle, end, got 'top'"),
    ],
)
def test_grids_out_of_range_are_refused(options: dict[str, tuple], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        NeedleGrid(**options)


def test_a_length_without_room_says_how_much_is_needed(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"a prompt of 50 tokens has no room .* take 1?[0-9]+;"):
        evaluate_needle(llm, NeedleGrid(lengths=(50,)))


def test_an_empty_filler_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="the text is empty"):
        evaluate_needle(llm, GRID, filler="")


def test_filler_is_stable_and_grows_at_its_end() -> None:
    text = write_filler(20)
    assert write_filler(40).startswith(text)
    assert not any(character.isdigit() for character in text)
    assert text.startswith("As usual the station master measured a basket of pears")
    assert len(set(text.split("."))) > 19


def test_filler_has_the_number_of_tokens_asked_for(llm: LLM) -> None:
    tokens = filler_tokens(llm, 1000)
    np.testing.assert_array_equal(filler_tokens(llm, 10), tokens[:10])
    assert (len(tokens), tokens.dtype) == (1000, np.int32)
    own = llm.tokenize("a b c", add_special=False)
    np.testing.assert_array_equal(filler_tokens(llm, 2 * len(own), "a b c"), own * 2)


def test_chat_prompts_have_the_models_own_form(llm: LLM) -> None:
    prompt = needle._PromptMaker(llm, 400, filler=None, chat=True).make(400, 0.5, "start", 0)
    text = llm.detokenize(prompt.tokens.tolist())
    assert len(prompt.tokens) == 400
    assert text.startswith("<|im_start|>user\nThere is a pass key hidden")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\nThe pass key is ")
    starts = prompt.tokens == llm.tokenize("<|im_start|>")[0]
    assert starts.sum() == 2, "control tokens of the template are single tokens"


def test_a_template_that_hides_the_text_is_refused(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(tensor_type="Q8_0")
    with (
        LLM(path, chat_template="{{ messages[0]['role'] }}") as llm,
        pytest.raises(UsageError, match="does not show the user's text"),
    ):
        evaluate_needle(llm, GRID, chat=True)


def test_every_length_is_read_by_its_own_budget(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = LLM.start_runner, []

    def record(self: LLM, n_positions: int, **options: object) -> object:
        started.append((n_positions, options.get("n_prompt"), options.get("attention")))
        return start(self, n_positions, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "start_runner", record)
    report = evaluate_needle(llm, GRID)
    sparse = [n_prompt for _, n_prompt, attention in started if attention is None]
    assert sparse == list(GRID.lengths)
    assert len({n_positions for n_positions, *_ in started}) == 1  # room for the longest answer
    assert report.attention == llm.report_attention(400)

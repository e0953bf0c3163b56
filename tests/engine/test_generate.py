"""The generation loop on a runner with scripted logits."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from edgeh2o.engine.generate import Generation, log_probability
from edgeh2o.errors import EdgeH2OError
from edgeh2o.sampling_config import SamplingParams
from tests.engine.fakes import PieceTokenizer, ScriptedRunner

PIECES = [b"a", b"b", b" ", b"EN", b"D", b"\xc3", b"\xa9", b"<end>", b"bEN"]
END = 7


def _generation(
    runner: ScriptedRunner, *, prompt: list[int] | None = None, **options: Any
) -> Generation:
    extra = {name: options.pop(name) for name in ("logprobs", "on_prefill") if name in options}
    tokenizer: Any = PieceTokenizer(PIECES, eog_ids=[END])
    sampling = SamplingParams(**({"temperature": 0.0} | options))
    return Generation(runner, tokenizer, prompt or [1, 2, 3], sampling, **extra)


def _runner(*script: int, **options: Any) -> ScriptedRunner:
    return ScriptedRunner(script, vocab_size=len(PIECES), **options)


def test_streams_tokens_until_the_end_token() -> None:
    runner = _runner(0, 1, END)
    generation = _generation(runner)
    tokens = list(generation)
    assert [token.token_id for token in tokens] == [0, 1, END]
    assert [token.text for token in tokens] == ["a", "b", ""]
    assert [token.finish_reason for token in tokens] == [None, None, "stop"]
    assert generation.text == "ab"
    assert generation.finish_reason == "stop"
    assert runner.calls == [("prefill", [1, 2, 3], True), ("decode", 0), ("decode", 1)]


def test_prompt_is_read_in_batches_and_only_the_last_is_marked() -> None:
    runner = _runner(END, batch_size=8)
    reports: list[tuple[int, int]] = []
    list(
        _generation(
            runner,
            prompt=[0] * 20,
            on_prefill=lambda done, total: reports.append((done, total)),
        )
    )
    assert [(len(call[1]), call[2]) for call in runner.calls] == [(8, False), (8, False), (4, True)]
    assert reports == [(n, 20) for n in (0, 4, 8, 12, 16, 18, 20)]


def test_max_tokens_ends_with_length_and_decodes_no_more() -> None:
    runner = _runner(0)
    generation = _generation(runner, max_tokens=3)
    assert [token.finish_reason for token in generation] == [None, None, "length"]
    assert runner.calls[1:] == [("decode", 0), ("decode", 0)]


def test_max_tokens_of_zero_reads_the_prompt_only() -> None:
    runner = _runner(0)
    generation = _generation(runner, max_tokens=0)
    assert list(generation) == []
    assert generation.finish_reason == "length"
    assert generation.ttft_s is None
    assert runner.calls == [("prefill", [1, 2, 3], True)]


@pytest.mark.parametrize("n_prompt_tokens", [3, 5])
def test_full_context_ends_with_length(n_prompt_tokens: int) -> None:
    """The token drawn from the last logits needs no place in the cache."""
    runner = _runner(0, max_context=5)
    generation = _generation(runner, prompt=[1] * n_prompt_tokens)
    assert len(list(generation)) == 5 - n_prompt_tokens + 1
    assert generation.finish_reason == "length"
    assert runner.position == 5


def test_stop_text_across_tokens_is_cut_out() -> None:
    runner = _runner(0, 3, 4, 1)
    tokens = list(_generation(runner, stop=("END",)))
    assert [token.text for token in tokens] == ["a", "", ""]
    assert tokens[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("script", "n_said", "text"),
    [
        ((0, 3, 4, 1), 1, "a"),  # E and ND are cut away whole
        ((0, 8, 4, 1), 2, "ab"),  # bEN is cut in two
        ((3, 4, 1), 0, ""),
        ((5, 6, 3, 4), 2, "\u00e9"),  # the first byte of a character has no text of its own
        ((0, END), 2, "a"),
    ],
)
def test_tokens_that_a_stop_text_takes_away_are_not_said(
    script: tuple[int, ...], n_said: int, text: str
) -> None:
    generation = _generation(_runner(*script), stop=("END",))
    certain = [token.certain_tokens for token in generation]
    assert (generation.n_said, generation.text) == (n_said, text)
    assert certain[-1] == n_said and certain == sorted(certain)
    assert len(generation.token_ids) >= n_said


def test_text_held_for_a_stop_text_comes_out_at_the_end() -> None:
    generation = _generation(_runner(0, 3, END), stop=("END",))
    tokens = list(generation)
    assert [token.text for token in tokens] == ["a", "", "EN"]
    assert [token.certain_tokens for token in tokens] == [1, 1, 3]
    assert generation.text == "aEN"
    generation = _generation(_runner(3), stop=("END",), max_tokens=1)
    assert [token.text for token in generation] == ["EN"]


def test_characters_come_out_whole() -> None:
    tokens = list(_generation(_runner(5, 6, END)))
    assert [token.text for token in tokens] == ["", "\u00e9", ""]
    tokens = list(_generation(_runner(0, 5, END)))
    assert [token.text for token in tokens] == ["a", "", "\ufffd"]


def test_ignore_eos_never_draws_an_end_token() -> None:
    generation = _generation(_runner(END), ignore_eos=True, max_tokens=4)
    assert END not in [token.token_id for token in generation]
    assert generation.finish_reason == "length"


def test_repeat_penalty_looks_at_the_end_of_the_prompt() -> None:
    options: dict[str, Any] = {"max_tokens": 1, "repeat_penalty": 1e6}
    penalised = _generation(_runner(0), prompt=[0, 1, 2], repeat_last_n=3, **options)
    assert next(iter(penalised)).token_id != 0
    outside = _generation(_runner(0), prompt=[0, 1, 2], repeat_last_n=2, **options)
    assert next(iter(outside)).token_id == 0
    whole_context = _generation(_runner(0), prompt=[0, 1, 2], repeat_last_n=-1, **options)
    assert next(iter(whole_context)).token_id != 0


def test_logprobs_are_those_of_the_unfiltered_distribution() -> None:
    token = next(iter(_generation(_runner(1), logprobs=True)))
    expected = 10.0 - math.log(math.exp(10.0) + math.exp(1.0) * (len(PIECES) - 1))
    assert token.logprob == pytest.approx(expected, rel=1e-12)
    assert next(iter(_generation(_runner(1)))).logprob is None


def test_log_probability_of_large_logits_is_finite() -> None:
    logits = np.array([1000.0, 999.0], dtype=np.float32)
    assert log_probability(logits, 1) == pytest.approx(-1.0 - math.log(1 + math.exp(-1.0)))


def test_seed_is_known_and_repeats_the_text() -> None:
    flat: dict[str, Any] = {
        "temperature": 1e6,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "ignore_eos": True,
    }
    flat["max_tokens"] = 30
    first = _generation(_runner(0), **flat)
    ids = [token.token_id for token in first]
    again = _generation(_runner(0), seed=first.seed, **flat)
    assert [token.token_id for token in again] == ids
    assert len(set(ids)) > 3


def test_interrupt_keeps_what_was_generated() -> None:
    def interrupt_at_second(token: int) -> None:
        if token == 1:
            raise KeyboardInterrupt

    generation = _generation(_runner(0, 1, 2, on_decode=interrupt_at_second))
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert generation.token_ids == [0, 1]
    assert generation.text == "ab"
    assert generation.finish_reason == "interrupted"
    assert generation.decode_tps is not None


def test_interrupt_during_prefill_keeps_the_batches_that_were_read() -> None:
    def interrupt(done: int, total: int) -> None:
        if done > 8:
            raise KeyboardInterrupt

    generation = _generation(_runner(0), prompt=[0] * 20, on_prefill=interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert generation.n_prefilled_tokens == 8
    assert generation.prefill_tps is not None
    assert generation.ttft_s is None
    assert generation.finish_reason == "interrupted"


def test_times_and_rates_fit_the_clock() -> None:
    begun_at = time.perf_counter()
    generation = _generation(
        _runner(0, on_decode=lambda _: time.sleep(0.002)), prompt=[0] * 9, max_tokens=6
    )
    list(generation)
    elapsed_s = time.perf_counter() - begun_at
    assert generation.ttft_s is not None
    assert 0 < generation.prefill_s <= generation.ttft_s
    assert generation.decode_s >= 5 * 0.002
    assert generation.ttft_s + generation.decode_s <= elapsed_s
    assert generation.prefill_tps == pytest.approx(9 / generation.prefill_s)
    assert generation.decode_tps == pytest.approx(5 / generation.decode_s)


def test_pairs_are_those_of_the_prompt() -> None:
    generation = _generation(_runner(0), prompt=[0] * 9, max_tokens=5)
    list(generation)
    assert (generation.pairs_computed, generation.pairs_dense) == (9, 45)


def test_broken_logits_give_one_clear_error() -> None:
    runner = _runner(0)
    runner._next_logits = lambda: np.full(len(PIECES), np.nan, np.float32)  # type: ignore[method-assign]
    with pytest.raises(EdgeH2OError, match=r"token 0 is nan; the model file may be damaged"):
        list(_generation(runner))

"""Prompt lookup: its index, how much it drafts, and that no text changes by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeh2o.config import PrefillConfig
from edgeh2o.engine._ngrams import NgramIndex
from edgeh2o.engine.drafting import CallCosts, Credit
from edgeh2o.engine.lookup import MAX_MATCH, MIN_PROMPT_TOKENS, DraftLength, PromptLookup
from edgeh2o.engine.speculation import SpeculativeDecoder
from edgeh2o.errors import UsageError
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.engine.drafted import PENALISED, SAMPLINGS, TogetherRunner
from tests.engine.fakes import ScriptedRunner
from tests.model.recurrent_models import MODELS
from tests.tiny_models import TinyModelFactory

VOCAB_SIZE = 320


def _find(text: Sequence[int]) -> tuple[int, int]:
    """By comparing everything with everything."""
    for n in (3, 2):
        starts = [i for i in range(n, len(text)) if text[i - n : i] == text[len(text) - n :]]
        if starts:
            length = 0
            while length < min(starts[-1], MAX_MATCH):
                if text[starts[-1] - 1 - length] != text[len(text) - 1 - length]:
                    break
                length += 1
            return starts[-1], length
    return 0, 0


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.sampled_from([0, 1, 2, 7, 2**31 - 1]), max_size=90),
    n_prompt=st.integers(0, 90),
)
def test_index_finds_what_a_search_finds(text: list[int], n_prompt: int) -> None:
    index = NgramIndex(90)
    index.extend(np.array(text[:n_prompt], np.int32))
    for end in range(min(n_prompt, len(text)), len(text) + 1):
        start, match = index.find(MAX_MATCH)
        assert (start, match) == _find(text[:end])
        assert index.n_tokens == end
        if match:
            longer = list(text[:end])  # what a copy token by token gives, also of itself
            for i in range(12):
                longer.append(longer[start + i])
            assert index.predict(start, 12) == longer[end:]
            assert index.at(start) == text[start]
        if end < len(text):
            index.push(text[end])


def test_index_is_bounded() -> None:
    index = NgramIndex(5)
    with pytest.raises(ValueError, match="holds 5 tokens"):
        index.extend(np.arange(6, dtype=np.int32))
    assert index.n_tokens == 0
    index.extend(np.arange(5, dtype=np.int32))
    with pytest.raises(ValueError, match="holds 5 tokens"):
        index.push(1)
    for position in (-1, 5):
        with pytest.raises(ValueError, match=f"position {position} is not one of the 5 tokens"):
            index.at(position)
        with pytest.raises(ValueError, match=f"position {position} is not one of the 5 tokens"):
            index.predict(position, 1)
    with pytest.raises(ValueError, match="capacity must be in"):
        NgramIndex(0)


def _simulate(
    row_cost: float, chance: float, n_tokens: int = 400, match: int = 5, seed: int = 0
) -> tuple[float, DraftLength, CallCosts]:
    """Time per token in calls of one token, where every guess is right with the same chance."""
    rng, costs = np.random.default_rng(seed), CallCosts()
    lengths = DraftLength(costs)
    time, n_done = 0.0, 0
    while n_done < n_tokens:
        n_drafted = lengths.choose(match, 15)
        hits = (rng.random(n_drafted) < chance).tolist()
        n_right = [*hits, False].index(False)
        seconds = 1.0 + row_cost * n_drafted
        costs.measure(n_drafted, seconds * 1e-3)
        lengths.credit.pay(n_drafted * costs.row_cost)
        for i in range(n_right + 1):
            is_right = i < n_right or (n_drafted == n_right and rng.random() < chance)
            lengths.learn(match, is_right=is_right)
            lengths.credit.earn(float(i < n_right))
        time += seconds
        n_done += n_right + 1
    return time / n_done, lengths, costs


@pytest.mark.parametrize("row_cost", [0.1, 0.3, 0.6, 1.0, 2.0])
def test_drafts_that_are_never_right_cost_three_percent_at_most(row_cost: float) -> None:
    for chance in (0.0, 0.1):
        assert _simulate(row_cost, chance, n_tokens=200)[0] < 1.03


@pytest.mark.parametrize("row_cost", [0.1, 0.3, 0.6])
def test_drafts_that_are_always_right_pay(row_cost: float) -> None:
    time, lengths, costs = _simulate(row_cost, 1.0, match=MAX_MATCH)
    assert time < 1.3 * (1 + 15 * row_cost) / 16
    assert lengths.choose(MAX_MATCH, 15) == min(15, int(DraftLength.MAX_CREDIT / row_cost))
    assert lengths.choose(MAX_MATCH, 3) == 3
    assert costs.row_cost == pytest.approx(row_cost, rel=0.01)


def test_a_drafted_token_as_dear_as_a_call_is_not_drafted() -> None:
    _, lengths, _ = _simulate(1.2, 0.95)
    assert lengths.choose(3, 15) == 0


def test_a_text_that_stops_repeating_itself_costs_little() -> None:
    """Nor does one that begins to wait long for its drafts."""
    _, lengths, costs = _simulate(0.3, 1.0)
    lost = 0.0
    for _ in range(200):
        n_drafted = lengths.choose(5, 15)
        costs.measure(n_drafted, (1.0 + 0.3 * n_drafted) * 1e-3)
        lengths.credit.pay(n_drafted * costs.row_cost)
        lengths.learn(5, is_right=False)
        lost += 0.3 * n_drafted
    assert lost < DraftLength.MAX_CREDIT + Credit.ALLOWANCE * 200 + 1
    for _ in range(60):
        lengths.learn(5, is_right=True)
    assert lengths.choose(5, 15) > 0


def _advance_all(
    script: list[int],
    prompt: list[int],
    *,
    n_tokens: int,
    length: int | None,
    max_context: int = 99,
) -> tuple[list[int], TogetherRunner, SpeculativeDecoder]:
    runner = TogetherRunner(script, max_context=max_context, batch_size=64)
    logits = runner.prefill(np.array(prompt, np.int32), is_last=True)
    costs = CallCosts()
    drafter = PromptLookup(np.array(prompt, np.int32), max_context, costs, length)
    lookup = SpeculativeDecoder(runner, n_tokens, [drafter], costs)
    tokens = [int(np.argmax(logits))]
    while len(tokens) < n_tokens and runner.position < max_context:
        tokens.append(int(np.argmax(lookup.advance(tokens[-1]))))
        assert runner.position == len(prompt) + len(tokens) - 1
    return tokens, runner, lookup


def test_right_drafts_are_taken_whole() -> None:
    prompt, script = list(range(20)), [*range(5, 17), 3, 3, 3]
    tokens, runner, lookup = _advance_all(script, [*prompt, 3, 4], n_tokens=12, length=4)
    assert tokens == script[:12]
    assert runner.calls[1:] == [
        ("decode_batch", [5, 6, 7, 8, 9]),
        ("decode_batch", [10, 11, 12, 13, 14]),
        ("decode", 15),  # nothing is wanted after the twelfth token
    ]
    assert lookup.counts() == {"decode_calls": 3, "drafted_tokens": 8, "accepted_tokens": 8}


def test_wrong_drafts_are_left_out() -> None:
    script = [5, 6, 60, 7, 8, 61, 62]
    tokens, runner, lookup = _advance_all(script, [*range(20), 4], n_tokens=7, length=3)
    assert tokens == script
    assert runner.calls[1] == ("decode_batch", [5, 6, 7, 8])
    assert runner.calls[4] == ("decode_batch", [8, 9])  # no more than are wanted
    assert lookup.counts() == {"decode_calls": 5, "drafted_tokens": 4, "accepted_tokens": 1}
    assert runner.position == 21 + 6


def test_drafts_end_with_the_context() -> None:
    tokens, runner, _ = _advance_all(
        [*range(5, 20)], list(range(20)), n_tokens=99, length=15, max_context=26
    )
    assert len(tokens) == 7
    assert runner.position == 26


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    path = tiny_model(tensor_type="Q4_0", n_layers=2)
    with LLM(path, prefill=PrefillConfig(batch_size=64, chunk_size=16)) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """Much of it twice, so that there is something to find."""
    part = np.random.default_rng(3).integers(3, VOCAB_SIZE, 90).tolist()
    return part + part[:70] + part[20:] + part[::-1] + part


def _without(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, lookup="off")


@pytest.mark.parametrize("options", SAMPLINGS + PENALISED)
@pytest.mark.parametrize("lookup", ["auto", "1", "5", "15"])
def test_answers_are_those_without(
    llm: LLM, prompt: list[int], lookup: str, options: dict[str, Any]
) -> None:
    n_accepted = 0
    for seed in range(4):
        sampling = SamplingParams(
            **options, seed=seed, max_tokens=60, ignore_eos=seed % 2 == 0, lookup=lookup
        )
        found = llm.generate(prompt, sampling, logprobs=True)
        plain = llm.generate(prompt, _without(sampling), logprobs=True)
        assert (found.text, found.token_ids) == (plain.text, plain.token_ids)
        assert (found.logprobs, found.finish_reason) == (plain.logprobs, plain.finish_reason)
        assert plain.stats.decode_calls == plain.stats.drafted_tokens == 0
        stats = found.stats
        assert stats.decode_calls + stats.accepted_tokens == stats.generated_tokens - 1
        n_accepted += stats.accepted_tokens
    if options == SAMPLINGS[0] and lookup != "auto":
        assert n_accepted > 20  # greedy answers of random weights run in circles


def test_answers_end_where_they_would(llm: LLM, prompt: list[int]) -> None:
    """By a stop text, the number of tokens, the context."""
    greedy = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, lookup="15")
    whole = llm.generate(prompt, greedy)
    assert whole.stats.accepted_tokens > 10
    stops = [(whole.text[i : i + 3],) for i in range(5, 60, 9)]
    variants = [replace(greedy, stop=stop) for stop in stops]
    variants += [replace(greedy, max_tokens=n) for n in range(9)]
    for sampling in variants:
        found, plain = llm.generate(prompt, sampling), llm.generate(prompt, _without(sampling))
        assert (found.text, found.token_ids) == (plain.text, plain.token_ids)
        assert found.finish_reason == plain.finish_reason
    prefill = PrefillConfig(batch_size=64, chunk_size=16)
    with LLM(llm.model_path, context_size=len(prompt) + 41, prefill=prefill) as small:
        results = [
            small.generate(prompt, replace(greedy, max_tokens=-1, lookup=lookup))
            for lookup in ("15", "4", "off")
        ]
    # Not those of the long context: its attention adds up in another order, and near ties part.
    assert {len(result.token_ids) for result in results} == {42}
    assert len({result.token_ids for result in results}) == 1
    assert {result.finish_reason for result in results} == {"length"}


@pytest.mark.parametrize("n_read", [1, 7, 20])
def test_what_a_closed_stream_leaves_is_what_was_read(
    llm: LLM, prompt: list[int], n_read: int, tmp_path: Path
) -> None:
    """A chat goes on from it, a session file holds it: bit for bit the same."""
    sampling = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, lookup="15")
    found = []
    for chosen in (sampling, _without(sampling)):
        llm.forget()
        stream = llm.stream(prompt, chosen, keep_cache=True)
        text = "".join(next(stream).text for _ in range(n_read))
        stream.close()
        assert stream.result().text == text
        path = tmp_path / f"{chosen.lookup}.session"
        llm.save_session(path)
        longer = [*prompt, *stream.result().token_ids, 9, 8, 7]
        after = llm.generate(longer, _without(sampling), keep_cache=True)
        found.append((text, path.read_bytes(), after.token_ids, after.stats.cached_tokens))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "model",
    [
        *("lfm2", "qwen35", "qwen4exp", "falcon-h1", "bailingmoe3", "kimi-linear"),
        *("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "plamo2"),
    ],
)
def test_recurrent_layers_take_guesses_back(
    tiny_model: TinyModelFactory, prompt: list[int], model: str, tmp_path: Path
) -> None:
    """Answers of three tokens alone, which repeat themselves now and then."""
    path = tiny_model(tensor_type="Q4_0", **MODELS[model])
    bias, n_drafted, n_accepted = dict.fromkeys((5, 6, 9), 100.0), 0, 0
    with LLM(path, prefill=PrefillConfig(batch_size=64, chunk_size=16)) as llm:
        for lookup, temperature in (("auto", 0.0), ("3", 0.0), ("15", 0.0), ("15", 1.0)):
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=70,
                seed=1,
                logit_bias=bias,
                frequency_penalty=0.3,
                lookup=lookup,
            )
            found = []
            for chosen in (sampling, _without(sampling)):
                llm.forget()
                result = llm.generate(prompt, chosen, logprobs=True, keep_cache=True)
                session = tmp_path / "session"
                llm.save_session(session)
                found.append((result.token_ids, result.logprobs, session.read_bytes()))
                n_drafted += result.stats.drafted_tokens
                n_accepted += result.stats.accepted_tokens
            assert found[0] == found[1]
    assert 20 < n_accepted < n_drafted - 20


def test_an_interrupt_leaves_a_whole_session(
    llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, lookup="15")
    expected = llm.generate(prompt, _without(sampling))
    advance, said = SpeculativeDecoder.advance, []

    def interrupted(self: SpeculativeDecoder, token: int) -> np.ndarray:
        logits = advance(self, token)
        if len(said) == 20:
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(SpeculativeDecoder, "advance", interrupted)
    stream = llm.stream(prompt, sampling, keep_cache=True)
    with pytest.raises(KeyboardInterrupt):
        for chunk in stream:
            said.append(chunk.token_id)
    monkeypatch.undo()
    assert len(said) == 20
    result = stream.result()
    assert result.finish_reason == "interrupted"
    assert list(result.token_ids) == list(expected.token_ids[: len(result.token_ids)])
    again = llm.generate([*prompt, *result.token_ids], sampling, keep_cache=True)
    assert again.stats.cached_tokens >= len(prompt)
    rest = expected.token_ids[len(result.token_ids) :]
    assert again.token_ids[: len(rest)] == rest


def test_auto_is_for_long_prompts(llm: LLM, prompt: list[int]) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert sampling.lookup == "auto"
    short = llm.generate(prompt[: MIN_PROMPT_TOKENS - 1], sampling).stats
    assert short.decode_calls == 0
    long = llm.generate(prompt[:MIN_PROMPT_TOKENS], sampling).stats
    assert long.decode_calls > 0
    asked = llm.generate(prompt[:20], replace(sampling, lookup=3)).stats
    assert asked.drafted_tokens > 0


@pytest.mark.parametrize("lookup", [0, 16, -1, "on", "", "1.5", None, True, 4.0, "\u0663"])
def test_settings_that_cannot_be(lookup: Any) -> None:
    with pytest.raises(UsageError, match=r"lookup \(--lookup\) must be auto, off or a number of"):
        SamplingParams(lookup=lookup)


def test_runners_of_single_tokens_refuse_by_name() -> None:
    from edgeh2o.engine.generate import Generation
    from tests.engine.fakes import PieceTokenizer

    runner: Any = ScriptedRunner([1, 2, 3])
    tokenizer: Any = PieceTokenizer([bytes([97 + i % 26]) for i in range(64)])
    with pytest.raises(UsageError, match=r"lookup \(--lookup\) 4 is for GGUF models on the CPU"):
        Generation(runner, tokenizer, [1] * 300, SamplingParams(lookup="4"))
    runner = ScriptedRunner([1, 2, 3], max_context=400, batch_size=300)
    generation = Generation(
        runner, tokenizer, [1] * 300, SamplingParams(temperature=0, max_tokens=4)
    )
    assert [chunk.token_id for chunk in generation] == [1, 2, 3, 3]
    assert generation.speculation is None

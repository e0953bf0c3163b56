"""Answers that are written alone look ahead in their prompt; nothing of them changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from edgeh2o import SamplingParams
from edgeh2o.engine.grammar import Grammar
from edgeh2o.serving.requests import GenerationRequest
from tests.serving.answering import answer, request_of, tokens_of
from tests.serving.conftest import open_engine


def repeating(lookup: str, seed: int, **fields: object) -> GenerationRequest:
    """Of a prompt that repeats itself; a greedy answer of random weights runs in circles."""
    part = tokens_of(90, seed=seed)
    made = request_of(part + part[:70] + part[20:] + part, **fields)
    options = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "lookup": lookup}
    return replace(made, sampling=SamplingParams(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("lookup", ["15", "3", "auto"])
def test_an_answer_alone_is_that_without(serving_model: Path, lookup: str) -> None:
    with open_engine(serving_model, prefix_ram_bytes=0) as engine:
        n_accepted = 0
        for seed in range(3):
            plain = answer(engine, repeating("off", seed))
            found = answer(engine, repeating(lookup, seed))
            assert (found.text, found.logprobs) == (plain.text, plain.logprobs)
            stats = found.stats
            assert (stats.decode_calls or 0) + (stats.accepted_tokens or 0) == 59
            n_accepted += stats.accepted_tokens or 0
        assert lookup == "auto" or n_accepted > 20
        grammar = Grammar("regex", "(ab|c){5,40}d")
        plain = answer(engine, repeating("off", 1, grammar=grammar))
        assert answer(engine, repeating(lookup, 1, grammar=grammar)).logprobs == plain.logprobs


def test_neighbours_and_lookup_change_nothing(serving_model: Path) -> None:
    wanted = [repeating("15", seed) for seed in range(6)]
    with open_engine(serving_model, prefix_ram_bytes=0) as engine:
        alone = [answer(engine, repeating("off", seed)) for seed in range(6)]
    with open_engine(serving_model) as engine, ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda request: answer(engine, request), wanted))
        assert [each.logprobs for each in together] == [each.logprobs for each in alone]
        # What is kept holds the tokens that were looked at and taken, and no others.
        again = list(threads.map(lambda request: answer(engine, request), wanted))
    assert [each.logprobs for each in again] == [each.logprobs for each in alone]
    assert all(each.stats.cached_tokens == each.stats.prompt_tokens for each in again)

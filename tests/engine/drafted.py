"""What tests of drafts share: samplings, comparisons, a runner that looks at several tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o.errors import UsageError
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.engine.fakes import ScriptedRunner

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.3, "repeat_last_n": -1},
    {"temperature": 0.3, "top_k": 0, "min_p": 0.0},
    {"temperature": 0.7, "repeat_penalty": 1.1, "repeat_last_n": 20},
    {"temperature": 1.5, "top_p": 0.5},
    {
        **{"temperature": 1.1, "dynatemp_range": 0.4, "top_n_sigma": 3.0, "typical_p": 0.95},
        **{"xtc_probability": 0.5, "xtc_threshold": 0.05},
        **{"dry_multiplier": 0.6, "dry_allowed_length": 1, "dry_penalty_last_n": 20},
    },
    {
        "samplers": ("temperature", "top_k", "dry", "xtc", "penalties", "top_p"),
        **{"temperature": 1.2, "top_p": 0.8, "repeat_penalty": 1.2, "repeat_last_n": 20},
        **{"xtc_probability": 0.5, "xtc_threshold": 0.05},
        **{"dry_multiplier": 0.6, "dry_penalty_last_n": 20},
    },
]
# What it learns from a token counts for the next.
SAMPLINGS += [
    {"mirostat": version, "mirostat_tau": 3.0, "mirostat_eta": 0.4, "temperature": 0.9}
    for version in (1, 2)
]
SAMPLINGS.append(
    {
        **{"samplers": ("top_k", "temperature", "adaptive_p"), "temperature": 0.9},
        **{"adaptive_target": 0.4, "adaptive_decay": 0.7},
    }
)
# By what changes the logits before the sampler sees them.
PENALISED = [
    {"temperature": 0.0, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.7, "presence_penalty": -0.5, "logit_bias": {5: 1.0, 9: -100}},
]


class TogetherRunner(ScriptedRunner):
    """Looks at several tokens; the script goes on from those that were accepted."""

    max_decode_tokens = 16

    def __init__(self, script: Sequence[int], **options: Any) -> None:
        super().__init__(script, **options)
        self.ahead = 0

    def decode(self, token: int) -> np.ndarray:
        self.ahead = 0
        return super().decode(token)

    def decode_batch(self, tokens: np.ndarray) -> np.ndarray:
        assert tokens.dtype == np.int32
        assert self.position + len(tokens) <= self.max_context
        first, n_logits = self.decode(int(tokens[0])), self._n_logits
        rows = [first, *(self._next_logits() for _ in tokens[1:])]
        self.calls[-1] = ("decode_batch", tokens.tolist())
        self._n_logits, self.ahead = n_logits, len(tokens) - 1
        return np.stack(rows)

    def accept(self, n: int) -> None:
        assert n <= self.ahead
        self.ahead -= n
        self.position += n
        self._n_logits += n


def without_drafts(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, draft_tokens="off", lookup="off")


def compare_drafted(llm: LLM, prompt: list[int], sampling: SamplingParams, **options: Any) -> Any:
    """Statistics with drafts; what comes out is what comes out without."""
    plain = llm.generate(prompt, without_drafts(sampling), logprobs=True)
    found = llm.generate(prompt, sampling, logprobs=True, **options)
    assert (found.text, found.token_ids) == (plain.text, plain.token_ids)
    assert (found.logprobs, found.finish_reason) == (plain.logprobs, plain.finish_reason)
    assert plain.stats.decode_calls == 0
    stats = found.stats
    assert stats.decode_calls + stats.accepted_tokens == stats.generated_tokens - 1
    return stats


def check_turns(llm: LLM, prompt: list[int]) -> Iterator[list[int]]:
    """A growing prompt, ones that depart earlier, and a new one: each when it was answered.

    All that ``llm`` drafts is right.
    """
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, draft_tokens="4")
    llm.forget()
    first = llm.generate(prompt, greedy, keep_cache=True)
    turns = [
        [*prompt, *first.token_ids, 9, 8, 7],
        [*prompt, *first.token_ids[:11], 5, 6],
        prompt[:130],
        prompt[::-1],
    ]
    for turn in turns:
        found = llm.generate(turn, greedy, keep_cache=True)
        assert found.token_ids == llm.generate(turn, without_drafts(greedy)).token_ids
        assert found.stats.accepted_tokens == found.stats.drafted_tokens > 0
        yield turn


def check_session_file(llm: LLM, prompt: list[int], folder: Path) -> None:
    """It holds no draft; all that ``llm`` drafts is right, before and after."""
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, draft_tokens="4")
    files = []
    for sampling in (greedy, without_drafts(greedy)):
        llm.forget()
        llm.generate(prompt, sampling, keep_cache=True)
        path = folder / f"{sampling.draft_tokens}.session"
        llm.save_session(path)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    llm.generate(prompt[::-1], greedy, keep_cache=True)
    llm.load_session(path)
    found = llm.generate([*prompt, 5, 4], greedy, keep_cache=True)
    assert found.stats.cached_tokens == len(prompt)
    assert found.stats.accepted_tokens == found.stats.drafted_tokens > 0
    llm.forget()


def check_shift(llm: LLM, prompt: list[int]) -> None:
    """Of a context of 200 tokens, where all drafts are right; they do not go with eviction."""
    greedy = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, draft_tokens="4")
    stats = compare_drafted(llm, prompt, replace(greedy, context_full="shift"))
    assert stats.context_shifts > 0
    assert stats.accepted_tokens == stats.drafted_tokens > 50
    with pytest.raises(UsageError, match=r"a draft model \(--draft\) does not go with"):
        llm.generate(prompt, replace(greedy, context_full="evict"))

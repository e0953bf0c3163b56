"""Requests to an engine without HTTP, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeh2o import DenseConfig, H2OConfig, HeadwiseConfig, SamplingParams
from edgeh2o.engine.stats import GenerationStats
from edgeh2o.serving.answers import AnswerEngine
from edgeh2o.serving.events import Event, Finished, Piece
from edgeh2o.serving.requests import GenerationRequest
from edgeh2o.serving.ticket import Ticket

ATTENTIONS = {
    "dense": DenseConfig(),
    "h2o": H2OConfig(local=24, heavy=24),
    "headwise": HeadwiseConfig(budget=64, local=16),
}


@dataclass(frozen=True)
class Answered:
    """The text, the logarithms of the tokens' probabilities, and the statistics."""

    text: str
    logprobs: tuple[float, ...]
    finish_reason: str
    stats: GenerationStats


def tokens_of(length: int, seed: int) -> list[int]:
    """A prompt of random tokens of the tiny models."""
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def request_of(
    prompt: Sequence[int] | str, n_tokens: int = 6, **fields: object
) -> GenerationRequest:
    """A request for raw tokens or text, with probabilities to compare bit by bit."""
    sampling = SamplingParams(max_tokens=n_tokens, seed=7, ignore_eos=True)
    text = prompt if isinstance(prompt, str) else tuple(prompt)
    settings: dict[str, object] = {"kind": "text", "prompt": text, "sampling": sampling}
    settings |= {"top_logprobs": 0} | fields
    return GenerationRequest(**settings)  # type: ignore[arg-type]


def answer(engine: AnswerEngine, request: GenerationRequest) -> Answered:
    """The whole answer."""
    events: list[Event] = []
    engine.answer(request, events.append, Ticket())
    pieces = [event for event in events if isinstance(event, Piece)]
    last = events[-1]
    assert isinstance(last, Finished)
    return Answered(
        "".join(segment.text for piece in pieces for segment in piece.segments),
        tuple(piece.record.logprob for piece in pieces if piece.record is not None),
        last.finish_reason,
        last.stats,
    )

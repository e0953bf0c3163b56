"""What an answer tells while it is made: how far its prompt is read, its pieces, its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .segment import Segment

if TYPE_CHECKING:
    from ..engine.stats import GenerationStats


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of an answer: its bytes, and natural logarithms of probabilities if asked for.

    ``top`` are (bytes, logarithm) of the most likely tokens in its place, ``top_ids`` which those
    are. The bytes are part of the answer's text if ``is_text``; those of control tokens are not.
    ``logprob`` is nan for the first token of a prompt, which nothing comes before.
    """

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    is_text: bool = True
    token_id: int = -1
    top_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token has made certain: text, and the token itself, unless it may be taken away.

    ``stats`` is what the answer has cost so far, if that was asked for.
    """

    segments: tuple[Segment, ...]
    record: TokenRecord | None = None
    token_id: int | None = None
    stats: GenerationStats | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of the prompt that are read, cached ones left out of both, and in how long."""

    done: int
    total: int
    cached: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer: "stop", "length" or "tool_calls", and what it cost.

    ``stop_text`` is the one that ended it, if any did; ``prompt`` the text that it was to go on
    with.
    """

    finish_reason: str
    stats: GenerationStats
    stop_text: str = ""
    prompt: str = ""


Event: TypeAlias = Piece | Progress | Finished

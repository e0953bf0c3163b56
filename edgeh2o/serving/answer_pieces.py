"""The pieces of an answer out of the chunks of its generation: what of it has become certain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .events import Piece, TokenRecord
from .segment import Segment

if TYPE_CHECKING:
    from ..engine.generate import GenerationChunk
    from ..engine.logits import DrawnProbabilities, TopLogProbabilities
    from ..engine.stats import GenerationStats
    from ..tokenizer import Tokenizer
    from .segments import AnswerParser


class AnswerPieces:
    """Takes chunks, and says their text and each of their tokens once it is certain.

    ``top`` or ``drawn`` have noted probabilities of the tokens, if those were asked for. The first
    call ends the answer if ``is_one_call``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: AnswerParser,
        *,
        top: TopLogProbabilities | None = None,
        drawn: DrawnProbabilities | None = None,
        is_one_call: bool = False,
    ) -> None:
        self._tokenizer, self._parser = tokenizer, parser
        self._top, self._drawn, self._is_one_call = top, drawn, is_one_call
        self._called: list[Segment] = []  # the ends of calls
        self._ids: list[int] = []
        self._records: list[TokenRecord | None] = []
        self._n_told = 0
        self.stop_text = ""  # that has ended the answer

    def take(self, chunk: GenerationChunk, stats: GenerationStats | None) -> Iterator[Piece]:
        """What ``chunk`` has made certain; the last piece has the text, and ``stats``."""
        segments = self._parser.push(chunk.text)
        if chunk.finish_reason is not None:
            is_end = chunk.token_id in self._tokenizer.eog_ids
            segments += self._parser.finish(is_cut=not is_end)
        ends = [i for i, segment in enumerate(segments) if segment.ends_call]
        if self._is_one_call and ends:
            del segments[ends[0] + 1 :], ends[1:]
        self._called += [segments[i] for i in ends]
        self._records.append(self._record_of(chunk))
        self._ids.append(chunk.token_id)
        certain = range(self._n_told, chunk.certain_tokens)
        self._n_told = max(self._n_told, chunk.certain_tokens)
        self.stop_text = chunk.stop_text
        for i in certain[:-1]:  # a stop text might have taken them away
            yield Piece((), self._records[i], self._ids[i])
        yield Piece(
            tuple(segments),
            self._records[certain[-1]] if certain else None,
            self._ids[certain[-1]] if certain else None,
            stats,
        )

    @property
    def is_done(self) -> bool:
        """Whether the answer ends here, whatever else is generated."""
        return self._is_one_call and bool(self._called)

    @property
    def is_called(self) -> bool:
        """Whether the answer calls tools, the last of them with all its arguments."""
        return bool(self._called) and not self._called[-1].is_cut

    def _record_of(self, chunk: GenerationChunk) -> TokenRecord | None:
        index = len(self._ids)
        if self._drawn is not None:
            noted = self._drawn.logprobs[index], self._drawn.records[index]
            return record_token(self._tokenizer, chunk.token_id, *noted)
        if self._top is None or chunk.logprob is None:
            return None
        top = self._top.records[index]
        return record_token(self._tokenizer, chunk.token_id, chunk.logprob, top)


def record_token(
    tokenizer: Tokenizer,
    token_id: int,
    logprob: float = math.nan,
    top: Sequence[tuple[int, float]] = (),
) -> TokenRecord:
    """A token with its logarithm and the most likely ones, (id, logarithm), in its place."""
    read = tokenizer.token_bytes
    named = tuple((read(i) if i < tokenizer.vocab_size else b"", value) for i, value in top)
    is_text = bool(read(token_id, skip_special=True))
    ids = tuple(i for i, _ in top)
    return TokenRecord(read(token_id), logprob, named, is_text, token_id, ids)

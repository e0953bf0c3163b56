"""What may change the logits of a generation, or look at them, before a token is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..sampling_config import SamplingParams


class LogitsProcessor(Protocol):
    """One per generation; ``process`` and ``accept`` are called in turn, token by token."""

    def process(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """What is drawn from instead of ``logits`` [vocab_size], which stay as they are."""

    def accept(self, token_id: int) -> None:
        """``token_id`` was drawn."""

    def ahead(self, vocab_size: int) -> LogitsProcessor:
        """One that goes on from here with logits of ``vocab_size``; this one stays as it is."""


class ProcessorChain:
    """Processors one after the other."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = tuple(processors)

    def process(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        for processor in self._processors:
            logits = processor.process(logits)
        return logits

    def accept(self, token_id: int) -> None:
        for processor in self._processors:
            processor.accept(token_id)

    def ahead(self, vocab_size: int) -> ProcessorChain:
        return ProcessorChain([each.ahead(vocab_size) for each in self._processors])


class Penalties:
    """OpenAI's: ``bias`` is added to tokens; what was generated loses by presence and frequency.

    logit[t] += bias[t] - frequency * count[t] - presence * (count[t] > 0)
    """

    def __init__(
        self, bias: Mapping[int, float], *, presence: float = 0.0, frequency: float = 0.0
    ) -> None:
        self._bias = dict(bias)
        self._presence, self._frequency = presence, frequency
        self._counts: Counter[int] = Counter()

    def process(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        adjusted = logits.copy()
        for token_id, value in self._bias.items():
            adjusted[token_id] += np.float32(value)
        for token_id, count in self._counts.items():
            adjusted[token_id] -= np.float32(self._frequency * count + self._presence)
        return adjusted

    def accept(self, token_id: int) -> None:
        self._counts[token_id] += 1

    def ahead(self, vocab_size: int) -> Penalties:
        bias = {i: value for i, value in self._bias.items() if i < vocab_size}
        twin = Penalties(bias, presence=self._presence, frequency=self._frequency)
        twin._counts.update({i: n for i, n in self._counts.items() if i < vocab_size})
        return twin


def with_penalties(
    processor: LogitsProcessor | None, sampling: SamplingParams
) -> LogitsProcessor | None:
    """``processor``, followed by the penalties and biases of ``sampling`` if it has any."""
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if "penalties" not in sampling.acting_samplers:
        presence = frequency = 0.0
    if not (sampling.logit_bias or presence or frequency):
        return processor
    penalties = Penalties(sampling.logit_bias or {}, presence=presence, frequency=frequency)
    return penalties if processor is None else ProcessorChain([processor, penalties])


class DrawnProbabilities:
    """Notes of each token what it was drawn from, after all filters and the temperature.

    ``records[i]`` are pairs (token id, natural logarithm of its probability), most likely first,
    of the ``count`` likeliest that the i-th token was drawn among; ``logprobs[i]`` is that of the
    token itself, -inf where a grammar chose another one.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.records: list[list[tuple[int, float]]] = []
        self.logprobs: list[float] = []

    def note(
        self, tokens: NDArray[np.int32], probabilities: NDArray[np.float64], token_id: int
    ) -> None:
        """``token_id`` was drawn of ``tokens`` [n], most likely first, with ``probabilities``."""
        (places,) = np.nonzero(tokens == token_id)
        with np.errstate(divide="ignore"):
            logarithms = np.log(probabilities)
        self.logprobs.append(float(logarithms[places[0]]) if len(places) else -np.inf)
        pairs = zip(tokens[: self._count].tolist(), logarithms.tolist(), strict=False)
        self.records.append([(token, value) for token, value in pairs if value > -np.inf])


class TopLogProbabilities:
    """Notes the ``count`` most likely tokens before each that was drawn, and their logarithms.

    ``records[i]`` are pairs (token id, natural logarithm of its probability before any filter),
    most likely first, of the i-th token.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.records: list[list[tuple[int, float]]] = []

    def process(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        wide = logits.astype(np.float64) - float(logits.max())
        count = min(self._count, len(wide))
        order = np.argpartition(wide, -count) if count else np.empty(0, np.int64)
        best = order[len(order) - count :]
        total = float(np.log(np.exp(wide).sum()))
        found = [(int(token_id), float(wide[token_id]) - total) for token_id in best]
        self.records.append(sorted(found, key=lambda pair: (-pair[1], pair[0])))
        return logits

    def accept(self, token_id: int) -> None:
        """Nothing depends on it."""

    def ahead(self, vocab_size: int) -> ProcessorChain:
        """Nothing: what may be drawn is not noted."""
        return ProcessorChain([])

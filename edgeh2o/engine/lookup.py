"""Prompt lookup: the next tokens are guessed from the text so far, and checked together.

An answer often repeats the prompt or itself: names, code, whole sentences. The last tokens are
looked up in the text; what followed them there is a draft. One decode call gives the model's own
logits after every drafted token, and a draft counts as far as it equals what is drawn from them,
with the random numbers that would have been drawn without it: the text does not change.
(A. Saxena, "Prompt Lookup Decoding", 2023.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..config import AUTO_LOOKUP, EVICT_WHEN_FULL, LOOKUP_OFF, MAX_LOOKUP, SamplingParams
from ..errors import UsageError
from ..runners.base import free_positions
from ._ngrams import NgramIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..runners.base import BatchRunner, Runner

# Tokens of a prompt from which on "auto" looks up: shorter ones hold little to repeat.
MIN_PROMPT_TOKENS = 256
# Tokens of a match: at least those that are looked up; at most so many are counted, because how far
# it reaches back tells how far it goes on.
MIN_MATCH, MAX_MATCH = 2, 16


class DraftLength:
    """How many tokens to draft, by how often guesses were right and what a drafted token costs.

    A match of so many tokens is of a class; each has the share of its guesses that were right, a
    mean that forgets, over all generated tokens, drafted or not: looking up costs next to nothing.
    A call with k drafted tokens takes as long as 1 + k * ``row_cost`` calls of one, as measured.
    The length is that with the most tokens per time. What may be lost is limited: drafts are paid
    from a credit, which grows by what they spare and by ``ALLOWANCE`` of every token's time.
    """

    # Before anything is known: of matches of 2, 3, 4 to 7, 8 to 15, and more tokens; and how many
    # trials that counts for.
    FIRST_CHANCES = (0.3, 0.4, 0.6, 0.75, 0.9)
    FIRST_TRIALS = 4.0
    FIRST_ROW_COST = 0.3
    MEMORY = 0.97  # what trials count for after the next one
    RATE = 0.2  # of a measured time in its mean
    LEAST_GAIN = 1.05  # tokens in the time of one that a draft must promise
    # In calls of one token: of each token, in the beginning, at most.
    ALLOWANCE, FIRST_CREDIT, MAX_CREDIT = 0.02, 0.6, 5.0

    def __init__(self) -> None:
        self._trials = [self.FIRST_TRIALS] * len(self.FIRST_CHANCES)
        self._hits = [self.FIRST_TRIALS * chance for chance in self.FIRST_CHANCES]
        self._n_single = 0
        self._single_s = 0.0
        self.row_cost = self.FIRST_ROW_COST
        self._credit = self.FIRST_CREDIT

    def choose(self, match: int, most: int) -> int:
        """Tokens to draft after a match of so many, 0 to ``most``."""
        if match < MIN_MATCH or not self._n_single:
            return 0
        best, length, expected, chance = self.LEAST_GAIN, 0, 1.0, 1.0
        for k in range(1, min(most, int(self._credit / self.row_cost)) + 1):
            chance *= self.chance(match + k - 1)
            expected += chance
            gain = expected / (1.0 + k * self.row_cost)
            if gain > best:
                best, length = gain, k
        return length

    def chance(self, match: int) -> float:
        """The share of matches of so many tokens whose next token was right."""
        i = _class_of(match)
        return self._hits[i] / self._trials[i]

    def learn(self, match: int, *, is_right: bool) -> None:
        """Counts a generated token: what it was after a match of so many, 0 for none."""
        self.credit(self.ALLOWANCE)
        if match >= MIN_MATCH:
            i = _class_of(match)
            self._trials[i] = self.MEMORY * self._trials[i] + 1.0
            self._hits[i] = self.MEMORY * self._hits[i] + is_right

    def credit(self, n_calls: float) -> None:
        """Adds calls of one token that were spared."""
        self._credit = min(self.MAX_CREDIT, self._credit + n_calls)

    def measure(self, n_drafted: int, seconds: float) -> None:
        """Takes in what a call took, and pays for it."""
        if n_drafted == 0:
            self._n_single += 1
            if self._n_single > 1:  # else the machine may have done something else meanwhile
                seconds = min(seconds, 2.0 * self._single_s)
            self._single_s += max(self.RATE, 1.0 / self._n_single) * (seconds - self._single_s)
            return
        cost = (seconds / max(self._single_s, 1e-9) - 1.0) / n_drafted
        self.row_cost += self.RATE * (min(max(cost, 0.02), 3.0 * self.row_cost) - self.row_cost)
        self._credit -= n_drafted * self.row_cost


def _class_of(match: int) -> int:
    return min(max(match, 2) - 2, 1) if match < 4 else min(match.bit_length(), 5) - 1


class LookupDecoder:
    """Decodes token after token on a runner, several in a call where the text repeats itself.

    Between two calls of ``advance`` the runner holds what it would hold without lookup.
    ``n_tokens`` is the most that will be drawn, -1 for no limit; ``length`` drafts so many always,
    None as many as pay.
    """

    def __init__(
        self, runner: BatchRunner, prompt: NDArray[np.int32], n_tokens: int, length: int | None
    ) -> None:
        self._runner = runner
        self._prompt = prompt
        self._index: NgramIndex | None = None
        self._most = min(runner.max_decode_tokens - 1, length or MAX_LOOKUP)
        self._lengths = DraftLength() if length is None else None
        self._is_limited = n_tokens >= 0
        self._n_left = n_tokens if self._is_limited else runner.max_context
        # Drafted tokens that were not reached yet, last first, and the logits after each.
        self._ahead: list[tuple[int, NDArray[np.float32]]] = []
        self._n_calls = self._n_drafted = self._n_accepted = 0

    def counts(self) -> dict[str, Any]:
        """By field of ``GenerationStats``."""
        return {
            "decode_calls": self._n_calls,
            "drafted_tokens": self._n_drafted,
            "accepted_tokens": self._n_accepted,
        }

    def begin_again(self, tokens: NDArray[np.int32]) -> None:
        """The runner holds ``tokens`` [n] now, and no draft is left."""
        self._prompt, self._index, self._ahead = tokens, None, []
        if not self._is_limited:
            self._n_left = self._runner.max_context

    def advance(self, token: int) -> NDArray[np.float32]:
        """Appends ``token``, the latest drawn; returns the logits [vocab_size] after it."""
        start, match = self._push(token)
        self._n_left -= 1
        if self._ahead:
            drafted, logits = self._ahead.pop()
            if drafted == token:
                self._runner.accept(1)
                self._n_accepted += 1
                if self._lengths is not None:
                    self._lengths.credit(1.0)
                return logits
        return self._call(token, self._choose(start, match))

    def _push(self, token: int) -> tuple[int, int]:
        """Adds a token to the text; returns what its new ending matches."""
        if self._index is None:  # not before the first token is out
            self._index = NgramIndex(self._runner.max_context)
            self._index.extend(self._prompt)
        start, match = self._index.find(MAX_MATCH)
        if self._lengths is not None:
            self._lengths.learn(match, is_right=match > 0 and self._index.at(start) == token)
        self._index.push(token)
        return self._index.find(MAX_MATCH)

    def _choose(self, start: int, match: int) -> list[int]:
        """The draft: no longer than the context, the answer and the runner allow."""
        runner, index = self._runner, self._index
        most = min(self._most, self._n_left - 1, free_positions(runner) - 1)
        if self._lengths is not None:
            most = self._lengths.choose(match, most)
        return index.predict(start, most) if index and match and most > 0 else []

    def _call(self, token: int, draft: list[int]) -> NDArray[np.float32]:
        begun_at = time.perf_counter()
        self._ahead = []
        if draft:
            rows = self._runner.decode_batch(np.array([token, *draft], np.int32))
            draft = draft[: len(rows) - 1]  # those that were looked at
            self._ahead = list(zip(draft, rows[1:], strict=True))[::-1]
            logits: NDArray[np.float32] = rows[0]
        else:
            logits = self._runner.decode(token)
        self._n_calls += 1
        self._n_drafted += len(draft)
        if self._lengths is not None:
            self._lengths.measure(len(draft), time.perf_counter() - begun_at)
        return logits


def start_lookup(
    runner: Runner, prompt: Sequence[int] | NDArray[np.int32], sampling: SamplingParams
) -> LookupDecoder | None:
    """What decodes with lookup, if it is asked for or may pay; None for single tokens.

    Raises UsageError where it is asked for and the runner takes one token at a time.
    """
    if sampling.lookup == LOOKUP_OFF:
        return None
    is_auto = sampling.lookup == AUTO_LOOKUP
    if is_auto and len(prompt) < MIN_PROMPT_TOKENS:
        return None
    if runner.max_decode_tokens == 1:
        if is_auto:
            return None
        if sampling.context_full == EVICT_WHEN_FULL:
            raise UsageError(
                f"lookup (--lookup) {sampling.lookup} does not go with --context-full evict, which "
                "looks at the attention of every token; use --lookup auto or --context-full shift"
            )
        raise UsageError(
            f"lookup (--lookup) {sampling.lookup} is for GGUF models on the CPU without "
            "recurrent layers: elsewhere the result of a token depends on how many go together, so "
            "that the text would change, or a guess that was wrong cannot be taken back; use "
            "--lookup auto or off"
        )
    length = None if is_auto else int(sampling.lookup)
    tokens = np.asarray(prompt, np.int32)
    return LookupDecoder(cast("BatchRunner", runner), tokens, sampling.max_tokens, length)

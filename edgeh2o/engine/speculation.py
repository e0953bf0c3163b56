"""Speculative decoding: guessed tokens are checked together, and the text stays the same.

One decode call gives the model's own logits after every drafted token, and a draft counts as far as
it equals what is drawn from them, with the random numbers that would have been drawn without it:
the text does not change. Drafts come from the text so far (prompt lookup), from a smaller model, or
from a layer of the model's own file.
(Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, accepts a
draft by a random choice; comparing it with the token that is drawn anyway keeps the text as well.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..errors import UsageError
from ..runners.runner_calls import free_positions, keep_hidden
from ..sampling_config import AUTO_DRAFT, AUTO_LOOKUP, EVICT_WHEN_FULL, LOOKUP_OFF, SamplingParams
from .drafting import CallCosts, Drafter
from .lookup import MIN_PROMPT_TOKENS, PromptLookup

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..runners.base import BatchRunner, Runner
    from .draft_sources import DraftSource
    from .drawing import TokenDrawer


class SpeculativeDecoder:
    """Decodes token after token on a runner, several in a call where they can be guessed.

    Between two calls of ``advance`` the runner holds what it would hold without drafts.
    ``n_tokens`` is the most that will be drawn, -1 for no limit. Of ``drafters`` the first one that
    has a draft is asked; ``costs`` are the runner's.
    """

    def __init__(
        self, runner: BatchRunner, n_tokens: int, drafters: Sequence[Drafter], costs: CallCosts
    ) -> None:
        self._runner = runner
        self._drafters = drafters
        self._costs = costs
        self._is_limited = n_tokens >= 0
        self._n_left = n_tokens if self._is_limited else runner.max_context
        # Drafted tokens that were not reached yet, last first, and the logits after each.
        self._ahead: list[tuple[int, NDArray[np.float32]]] = []
        self._source: Drafter | None = None  # of them
        self._n_calls = self._n_drafted = self._n_accepted = 0

    def counts(self) -> dict[str, Any]:
        """By field of ``GenerationStats``."""
        counts = {
            "decode_calls": self._n_calls,
            "drafted_tokens": self._n_drafted,
            "accepted_tokens": self._n_accepted,
        }
        for drafter in self._drafters:
            counts |= drafter.counts()
        return counts

    def draw_like(self, drawer: TokenDrawer) -> None:
        """``drawer`` draws the tokens."""
        for drafter in self._drafters:
            drafter.draw_like(drawer)

    def begin_again(self, tokens: NDArray[np.int32]) -> None:
        """The runner holds ``tokens`` [n] now, and no draft is left."""
        self._ahead = []
        for drafter in self._drafters:
            drafter.begin_again(tokens)
        if not self._is_limited:
            self._n_left = self._runner.max_context

    def forget_drafts(self) -> None:
        """The runner holds no drafted tokens any more: it went back to its position."""
        self._ahead = []

    def note_rows(self, first: int) -> None:
        """The runner has read tokens of the prompt from ``first`` on."""
        for drafter in self._drafters:
            drafter.note_rows(first)

    def advance(self, token: int) -> NDArray[np.float32]:
        """Appends ``token``, the latest drawn; returns the logits [vocab_size] after it."""
        for drafter in self._drafters:
            drafter.push(token)
        self._n_left -= 1
        if self._ahead:
            drafted, logits = self._ahead.pop()
            if drafted == token:
                self._runner.accept(1)
                self._n_accepted += 1
                if self._source is not None:
                    self._source.note_accepted()
                return logits
        return self._call(token)

    def _draft(self) -> list[int]:
        """The next tokens: no more than the context, the answer and the runner allow."""
        free = free_positions(self._runner) - 1
        most = min(self._runner.max_decode_tokens - 1, self._n_left - 1, free)
        for drafter in self._drafters:
            draft = drafter.draft(most)
            if draft:
                self._source = drafter
                return draft
        return []

    def _call(self, token: int) -> NDArray[np.float32]:
        self._ahead = []
        draft, first = self._draft(), self._runner.position
        begun_at = time.perf_counter()
        if draft:
            rows = self._runner.decode_batch(np.array([token, *draft], np.int32))
            n_checked = len(rows) - 1
            self._ahead = list(zip(draft[:n_checked], rows[1:], strict=True))[::-1]
            logits: NDArray[np.float32] = rows[0]
        else:
            n_checked = 0
            logits = self._runner.decode(token)
        self._costs.measure(n_checked, time.perf_counter() - begun_at)
        self.note_rows(first)
        self._n_calls += 1
        self._n_drafted += n_checked
        if draft and self._source is not None:
            self._source.note_checked(len(draft), n_checked)
        return logits


def start_speculation(
    runner: Runner,
    prompt: Sequence[int] | NDArray[np.int32],
    sampling: SamplingParams,
    model: DraftSource | None = None,
) -> SpeculativeDecoder | None:
    """What decodes with drafts, if they are asked for or may pay; None for single tokens.

    Raises UsageError where they are asked for and the runner takes one token at a time.
    """
    keep_hidden(runner, None if model is None else model.hidden_rows)
    if runner.max_decode_tokens == 1:
        refuse_drafts(sampling, has_draft=model is not None)
        return None
    is_auto = sampling.lookup == AUTO_LOOKUP
    looks_up = sampling.lookup != LOOKUP_OFF and (not is_auto or len(prompt) >= MIN_PROMPT_TOKENS)
    tokens = np.asarray(prompt, np.int32)
    costs: CallCosts = getattr(runner, "call_costs", None) or CallCosts()
    drafters: list[Drafter] = []
    if looks_up:
        length = None if is_auto else int(sampling.lookup)
        drafters.append(PromptLookup(tokens, runner.max_context, costs, length))
    if model is not None:
        is_auto = sampling.draft_tokens == AUTO_DRAFT
        length = None if is_auto else int(sampling.draft_tokens)
        drafters.append(model.make_drafter(runner, tokens, costs, length))
    if not drafters:
        return None
    return SpeculativeDecoder(cast("BatchRunner", runner), sampling.max_tokens, drafters, costs)


def refuse_drafts(sampling: SamplingParams, *, has_draft: bool) -> None:
    """Raises UsageError if drafts are asked for, from a runner that takes one token at a time."""
    if has_draft:
        raise _refuse("a draft model (--draft)", "leave it out", sampling)
    if sampling.lookup not in (AUTO_LOOKUP, LOOKUP_OFF):
        raise _refuse(f"lookup (--lookup) {sampling.lookup}", "use --lookup auto", sampling)


def _refuse(what: str, cure: str, sampling: SamplingParams) -> UsageError:
    if sampling.context_full == EVICT_WHEN_FULL:
        return UsageError(
            f"{what} does not go with --context-full evict, which looks at the attention of every "
            f"token; {cure}, or use --context-full shift"
        )
    return UsageError(
        f"{what} is for GGUF models on the CPU: elsewhere the result of a token depends on how "
        f"many go together, so that the text would change; {cure}"
    )

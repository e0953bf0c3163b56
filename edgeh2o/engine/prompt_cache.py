"""What a session's runner holds, by which plan it read it, and where the next prompt begins."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ..errors import ResourceError, UsageError
from ..runners.base import Runner, RunnerState
from ..runners.runner_calls import n_evicted, use_small_pages
from ..sampling_config import EVICT_WHEN_FULL, SamplingParams
from .context_size import choose_context, memory_cures, rotate_alike
from .learning import may_learn
from .memory_fit import check_start, fit_context, limit_to_memory, start_runner
from .payoff import choose_reading
from .transcript import count_common

if TYPE_CHECKING:
    from ..attention.budget_table import BudgetTable
    from ..model_config import DecoderConfig
    from .models import LoadedModel
    from .plan import RunPlan


# A prompt that fills less of the context takes memory as it is read: rows of every head lie a
# context apart, and in huge pages 16 tokens of SmolLM2-135M take all 94 MiB of 4,096 positions,
# which are cleared before the first token. Where most is filled they save 5 % of a decoded one.
LEAST_FILLED = 0.5


@dataclass(frozen=True, slots=True)
class Start:
    """Where a prompt of ``n_prompt`` tokens begins: behind ``n_kept`` of the cache, or anew.

    It is read by ``plan``, with room for ``context`` tokens.
    """

    plan: RunPlan
    context: int
    n_prompt: int
    n_kept: int = 0


class PromptCache:
    """A runner, which is reallocated only when a prompt needs more context.

    ``plan`` is that of prompts that begin anew, and follows what prompts teach; ``running`` is that
    of what the runner holds. Where memory does not hold a context that nobody named, one that
    ``takes_less`` has room for the prompt at least, others for an answer of open length too.
    Runners have ``open_context`` positions at least, those beyond ``length`` for an answer that
    goes on past it: such rows take no memory before they are written, and who reads the answer asks
    for it then.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = self.running = plan
        self.takes_less = True
        self.open_context = 0
        self.length = 0  # of the context by which what the runner holds is read
        self.profile: BudgetTable | None = None  # what prompts of this process have made
        self.runner: Runner | None = None  # None before the first prompt
        self.is_open = False  # what it holds may be gone on from
        self._model: LoadedModel | None = None

    @property
    def model(self) -> LoadedModel:
        """The weights. Raises UsageError once they are freed, and while they are being loaded."""
        if self._model is None:
            raise UsageError("the model is closed, or not loaded yet; load it again")
        return self._model

    def take_weights(self, model: LoadedModel) -> None:
        """Makes the cache fit for prompts."""
        self._model = model

    def use_adapters(self, scales: tuple[float, ...]) -> None:
        """Those of later prompts, which go on from nothing that others were read with."""
        self.plan = self.plan.with_adapters(scales)

    def limit_to_memory(self) -> None:
        """Prompts and their answers get no longer contexts than memory holds now."""
        self.plan = limit_to_memory(self.plan, self.model)

    def close(self) -> None:
        """Frees the weights and the runner."""
        self._model = self.runner = None

    @property
    def has_open_prompt(self) -> bool:
        """Whether there is something to go on from: a prompt, or its beginning up to a mark."""
        runner = self.runner
        return self.is_open and runner is not None and runner.find_mark(runner.position) > 0

    def plan_prompt(
        self,
        n_prompt: int,
        max_tokens: int,
        plan: RunPlan | None = None,
        *,
        goes_on: bool,
        stays_open: bool,
    ) -> tuple[RunPlan, int]:
        """By what a prompt that begins anew is read, and the context for it and its answer.

        ``plan`` is that of a saved session; else the first prompt from which the model is learnt
        begins dense, budgets are those of its length, and one that sparse prefill would not read
        faster is read dense: for one that ``stays_open`` when the context is full. A prompt that
        ``goes_on`` past the context needs no room for all of it. Raises UsageError for one that is
        too long.
        """
        context = choose_context(self.plan, n_prompt, max_tokens, goes_on=goes_on)
        if plan is not None:
            return plan.rounding_for(context), context
        length = context if stays_open else min(n_prompt, context)
        plan = choose_reading(self.plan, self.model, length)
        is_unknown = self.plan.attention.profiled_prompts == 0
        if is_unknown and n_prompt <= context and may_learn(self.plan, self.model, n_prompt):
            if plan.attention.profiled_prompts == 0:
                plan = plan.learning(context)
            elif plan.precisions.may_round:  # it shows whether its rest can be read in 8 bits
                plan = self.plan.reading_all()
        return plan.evicting() if goes_on else plan, context

    def begin_anew(self, plan: RunPlan, context: int, n_prompt: int) -> Runner:
        """A runner at position 0 for a prompt so long; what the one before held is gone.

        With room for less than ``context``, where memory does not hold it: ``_least_context``. The
        one before is still there where the next could not fit even in its place: ResourceError.
        """
        least = self._least_context(context, n_prompt)
        fitting = context
        if self.runner is not None and not self._serves(plan, context):
            freed = sum(self.runner.memory_bytes.values())
            fitting = self._fit_context(plan, context, least, freed)
        if self.runner is not None and self._serves(plan, fitting):
            self.runner.reset()
            self.length = fitting
            return self.runner
        self.runner = None  # freed before the next one is allocated
        self.running = plan
        fitting = self._fit_context(plan, context, least)
        if fitting < context:
            warnings.warn(
                f"memory has room for a context of {fitting:,} positions where the prompt of "
                f"{n_prompt:,} tokens and its answer were to have {context:,}; {memory_cures()} "
                "for more",
                stacklevel=2,
            )
        self.runner = self._start_runner(plan, fitting, n_prompt)
        return self.runner

    def _serves(self, plan: RunPlan, context: int) -> bool:
        """Whether the runner is fit for a prompt of such a plan that begins anew."""
        return plan == self.running and self._holds(context)

    def _least_context(self, context: int, n_prompt: int) -> int:
        """Of a ``context``, what a prompt cannot do without."""
        if self.plan.context_size is not None:
            return context
        if self.takes_less:
            return min(context, max(n_prompt, 1))
        return min(context, choose_context(self.plan, n_prompt, -1, goes_on=True))

    def _fit_context(self, plan: RunPlan, context: int, least: int, freed_bytes: int = 0) -> int:
        """As ``fit_context``; all of it where rows take no memory yet."""
        if not self.open_context:
            return fit_context(plan, self.model, context, least, freed_bytes)
        check_start(plan, self.model, plan.shape(least), freed_bytes)
        return context

    def _open_length(self, context: int) -> int:
        """Positions of a runner for a context so long, which rotates keys alike."""
        length = max(context, self.open_context)
        if rotate_alike(self.plan.config, length, context):
            return length
        return max(context, cast("DecoderConfig", self.plan.config).long_rope_after)

    def _start_runner(self, plan: RunPlan, context: int, n_tokens: int) -> Runner:
        """One for which ``_fit_context`` has found room."""
        self.length = context
        if self.open_context:
            shape = replace(plan.shape(context), max_context=self._open_length(context))
            return self.model.start_session(plan.attention, shape)
        runner = start_runner(plan, self.model, context)
        if n_tokens < LEAST_FILLED * context:
            use_small_pages(runner)
        return runner

    def _holds(self, context: int) -> bool:
        """Whether the runner has room for so many positions, and counts them alike."""
        length = 0 if self.runner is None else self.runner.max_context
        return length >= context and rotate_alike(self.plan.config, length, context)

    def choose_start(
        self, prompt: Sequence[int], sampling: SamplingParams, *, keep_cache: bool
    ) -> Start:
        """Where a prompt begins; nothing changes yet. Raises UsageError for one that is too long.

        The cache is kept as far as it agrees with the prompt. What a sparse prefill has read cannot
        be taken back singly: a prompt that departs from it earlier goes on from the last mark
        before. What an eviction has left serves prompts that go on past the context too.
        """
        goes_on, n_prompt = sampling.context_full == EVICT_WHEN_FULL, len(prompt)
        if keep_cache:
            needed = choose_context(self.running, n_prompt, sampling.max_tokens, goes_on=goes_on)
            n_kept = self._count_kept(prompt, needed, goes_on=goes_on)
            if n_kept:
                return Start(self.running, max(self.length, needed), n_prompt, n_kept)
        plan, needed = self.plan_prompt(
            n_prompt, sampling.max_tokens, goes_on=goes_on, stays_open=keep_cache
        )
        return Start(plan, needed, n_prompt)

    def _count_kept(self, prompt: Sequence[int], needed: int, *, goes_on: bool) -> int:
        """Tokens of the cache, in whose place as many of ``prompt`` need not be read."""
        runner = self.runner
        if runner is None or not self.is_open or not self._may_serve(runner, goes_on):
            return 0
        n_kept = count_common(runner.token_ids, prompt)
        if n_kept == len(prompt) and (runner.prompt_logits is None or n_kept != runner.prefill_end):
            n_kept -= 1  # the logits after the last token are needed
        n_kept = runner.find_mark(n_kept)
        if not n_kept or not self.may_go_on(n_kept, len(prompt), needed):
            return 0
        is_short = self.length < needed and 2 * n_kept < len(prompt)
        return 0 if is_short and self._may_turn_sparse(needed) else n_kept

    def begin_at(self, start: Start, sampling: SamplingParams) -> tuple[Runner, int]:
        """A runner for the prompt and how much it holds of it, to which it is yet to be rewound.

        The cache grows with its contents where it is too short and memory holds both for a moment;
        else it stays, if the prompt has room. Raises ResourceError.
        """
        if not start.n_kept:
            return self.begin_anew(start.plan, start.context, start.n_prompt), 0
        runner = self.runner
        if runner is not None and runner.max_context < start.context:
            runner = self._grow(runner, start)
        elif runner is not None:
            self.length = start.context
        if runner is not None:
            return runner, start.n_kept
        goes_on = sampling.context_full == EVICT_WHEN_FULL
        plan, context = self.plan_prompt(
            start.n_prompt, sampling.max_tokens, goes_on=goes_on, stays_open=True
        )
        # What its rule has seen cannot be moved.
        return self.begin_anew(plan, context, start.n_prompt), 0

    def _may_serve(self, runner: Runner, goes_on: bool) -> bool:
        """Whether a prompt that ``goes_on`` past the context, or not, may begin with the cache."""
        if self.running.adapter_scales != self.plan.adapter_scales:
            return False
        if goes_on:
            return self.running.evicting() == self.running
        return not n_evicted(runner)

    def may_go_on(self, n_kept: int, n_prompt: int, context: int) -> bool:
        """Whether a prompt may begin with so many tokens of the cache, and go on by its plan.

        In a context so long, for which the cache may have to grow.
        """
        length = context if self.runner is None else self.runner.max_context
        return rotate_alike(self.plan.config, length, context) and self.plan.may_go_on_by(
            self.running, n_kept, n_prompt, context
        )

    def _may_turn_sparse(self, context: int) -> bool:
        """Whether the cache was read dense for being short, and ``context`` no longer is."""
        is_dense = choose_reading(self.plan, self.model, context).attention.reads_all
        return self.running.attention.reads_all and not is_dense

    def _grow(self, old: Runner, start: Start) -> Runner | None:
        """Moves what is kept to a longer context; None where that cannot be, by rule or memory."""
        needed, trained = start.context, self.running.config.context_length
        # Twice as long, lest a chat moves at every turn.
        context = max(needed, min(trained, 2 * old.max_context))
        if not rotate_alike(self.running.config, context, needed):
            context = needed
        least = self._least_context(needed, start.n_prompt)
        try:
            context = self._fit_context(self.running, context, least)
        except ResourceError:
            context = 0
        if context <= old.max_context:
            return old if old.max_context >= least else None
        runner = self._start_runner(self.running, context, start.n_kept)
        old.rewind(start.n_kept)
        self.runner = runner if RunnerState.copy(old, runner) else None
        return self.runner

    def copy_from(self, other: PromptCache, n_tokens: int, context: int, n_prompt: int) -> None:
        """Takes up the first ``n_tokens`` of another cache of the model, up to one of its marks.

        With room for ``context`` tokens, or what memory holds of them, as ``begin_anew`` has it for
        a prompt of ``n_prompt``. The other stays as it is, and may be at work. Raises
        ResourceError for what does not fit in memory, ValueError for runners without ``copy_from``.
        """
        source, self.runner = other.runner, None
        least = self._least_context(context, n_prompt)
        context = self._fit_context(other.running, context, least)
        runner = self._start_runner(other.running, context, context)
        copy = getattr(runner, "copy_from", None)
        if copy is None or source is None:
            raise ValueError("these runners cannot be copied")
        copy(source, n_tokens)
        self.plan, self.profile = other.plan, other.profile
        self.running, self.runner = other.running, runner
        self.is_open = True

    def learn(self, table: BudgetTable) -> None:
        """Prompts that begin anew go by the profile."""
        self.profile = table
        self.plan = self.plan.varied(self.plan.settings.with_profile(table))

    @property
    def is_learning(self) -> bool:
        """Whether the rest of the prompt in the runner waits for what its beginning teaches."""
        return self.runner is not None and self.running.waits_for_profile

    def end_learning(self, length: int, *, has_learnt: bool) -> None:
        """The rest goes by the profile, or is read dense if there is none, or no gain.

        ``length`` is what the prompt may grow to.
        """
        runner, is_open = cast("Any", self.runner), self.running.attention.is_learning
        read_rest = getattr(runner, "read_rest", None)
        plan = self.plan if read_rest else self.plan.staying_exact()
        dense = plan.reading_all_on(saves_time=True).rounding_for(length)
        if not has_learnt:
            self.running = self.running.reading_all_on()
        elif not is_open:  # its rule reads everything
            self.running = replace(self.running, precision=dense.precision)
        else:
            chosen = choose_reading(plan, self.model, length)
            self.running = dense if chosen.attention.reads_all else chosen
        attention = cast("Any", self.running.attention)
        if is_open:
            runner.policy.set_budgets(attention.budgets, attention.decode_budgets or ())
        if read_rest:
            read_rest(self.running.precision, reads_all=attention.reads_all)

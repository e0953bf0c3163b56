"""What prompts teach of a model: who is profiled, what is kept of it, and what statistics say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from .. import _core
from ..attention.budget_points import budget_of_length
from ..attention.budget_table import BudgetTable
from ..attention.head_budgets import PROFILE_POINTS, TOO_SHORT, UNKNOWN, keys_per_query
from ..attention.kept_profiles import (
    MIN_PROMPT,
    PROFILE_TOKENS,
    is_kept_by_newer,
    keep_profile,
)
from ..model_config import DecoderConfig
from .context_size import context_limit
from .memory_fit import find_room, host_sizes, require_fit
from .payoff import choose_reading

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..runners.base import Runner
    from .models import LoadedModel
    from .plan import RunPlan
    from .profile import PromptProfiler


FIRST_CALL = PROFILE_TOKENS  # of a prompt: it has to hold what is looked at


def may_learn(plan: RunPlan, model: LoadedModel, n_tokens: int) -> bool:
    """Whether a prompt of ``n_tokens`` is to be profiled while it is read from its beginning."""
    return (
        plan.attention.profiled_prompts is not None
        and model.shows_attention
        and n_tokens >= MIN_PROMPT
        and plan.prefill.batch_size >= FIRST_CALL
    )


def lacks_profile(plan: RunPlan, model: LoadedModel) -> bool:
    """Whether nothing is known of the model, and a profile would say what it needs."""
    return plan.attention.profiled_prompts == 0 and may_learn(plan, model, context_limit(plan))


def measure_profile(
    plan: RunPlan, model: LoadedModel, token_ids: NDArray[np.int32]
) -> BudgetTable | None:
    """What ``token_ids`` [n] say of a model that lacks a profile, read for nothing else.

    None where they are too few or there can be no profile. Raises ResourceError if reading them
    does not fit in memory.
    """
    if not lacks_profile(plan, model) or not may_learn(plan, model, len(token_ids)):
        return None
    from .profile import profile_prompt, profile_shape

    shape = profile_shape(plan.threads)
    sizes = host_sizes(plan.reading_all(), shape, model.estimate_session_bytes)
    require_fit(shape.max_context, sizes, find_room(plan.threads))
    try:
        return profile_prompt(model, token_ids, threads=plan.threads)
    finally:
        _core.release_threads()  # as behind a generation: another thread may go on


class Learner:
    """An ``on_attention`` of the first call of a prompt; ``finish`` keeps what it measured.

    ``on_learnt(table)`` gets the profile that the model then has, None if there can be none;
    ``known`` is the one that this process has. It is not called for a prompt that is interrupted
    before. Where the rest goes by what it says it has to be called after ``first_call`` tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        plan: RunPlan,
        n_tokens: int,
        on_learnt: Callable[[BudgetTable | None], None],
        *,
        known: BudgetTable | None = None,
    ) -> None:
        from .profile import PromptProfiler

        self._profiler: PromptProfiler | None = PromptProfiler(
            model, threads=plan.threads, n_known=plan.attention.profiled_prompts or 0
        )
        self._known = known
        self._n_tokens = n_tokens
        self._on_learnt = on_learnt
        self.first_call = FIRST_CALL if plan.waits_for_profile else 0

    def watch(self, runner: Runner) -> Callable[..., Any]:
        """The ``prefill`` of a runner of a model that shows its attention, to look on."""
        return partial(cast("Any", runner).prefill, on_attention=self)

    def __call__(self, *rows: Any) -> None:
        """As ``PromptProfiler``."""
        if self._profiler is not None:
            self._profiler(*rows)

    def finish(self) -> None:
        """Adds the prompt to what is known, once."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            table = profiler.table(self._n_tokens)
            self._on_learnt(None if table is None else keep_profile(table, self._known))


def describe_knowledge(plan: RunPlan, model: LoadedModel, n_tokens: int, *, learns: bool) -> str:
    """Why a prompt is read dense and what would be gained; empty where it is not."""
    source = plan.attention.report(plan.config).get("table")
    if source not in (UNKNOWN, TOO_SHORT) or n_tokens < MIN_PROMPT:
        return ""
    if source == TOO_SHORT:
        return "read dense: sparse would not be faster at this length (--budget reads so anyhow)"
    chunk = plan.settings.preferred_chunk_size / 2
    budget = budget_of_length(PROFILE_POINTS, n_tokens)
    sparse = keys_per_query(n_tokens, budget + chunk)
    gain = f"{n_tokens / 2 / sparse:.1f}x fewer pairs at {n_tokens:,} tokens"
    config = plan.config
    if isinstance(config, DecoderConfig) and any(layer.window for layer in config.layers):
        gain = "if that is faster"  # with few layers that read the whole past it may not be
    if not model.shows_attention:
        cure = "a table of `edgeh2o calibrate` for the same weights or --budget"
        cure = cure if config.has_like_layers else "--budget"
        return f"read dense; this model cannot be profiled: {cure} lets it read sparse ({gain})"
    newer = describe_newer(model)
    if not learns:
        cure = f"a prompt that begins with {MIN_PROMPT:,} tokens makes a profile"
        return f"read dense{newer}; {cure}, `edgeh2o calibrate` a table ({gain})"
    later = "later prompts of this process" if newer else "later prompts"
    chosen = choose_reading(plan, model, n_tokens).attention.report(config).get("table")
    if chosen == TOO_SHORT:
        return f"read dense and profiled{newer}; {later} may be read faster by that"
    return f"read dense and profiled{newer}; {later} read sparse ({gain})"


def describe_newer(model: LoadedModel) -> str:
    """That what is kept of the model is a later version's, which this one does not write over."""
    is_newer = is_kept_by_newer(model.config.fingerprint)
    return " (the kept profile is of a newer edgeh2o, and stays)" if is_newer else ""

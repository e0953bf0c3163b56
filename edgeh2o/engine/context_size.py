"""How many positions a session gets: for a prompt and its answer, within what the model has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ContextLengthError
from ..host import memory
from ..model_config import DecoderConfig, ModelConfig
from ..rope_config import ROPE_OF_FILE

if TYPE_CHECKING:
    from .plan import RunPlan

MIN_DEFAULT_CONTEXT = 4096
# Room for an answer of open length (max_tokens = -1) when the context is sized by default.
OPEN_ANSWER_TOKENS = 1024
# Contexts that nobody asked for are a multiple of it.
CONTEXT_STEP = 256


def memory_cures(*, is_limit_named: bool = False) -> str:
    """What makes room for a longer context; the limit, if there is one, may have been named."""
    limit = memory.binding_limit()
    name = "that limit" if is_limit_named else f"the limit {limit}"
    more = f"raise {name}" if limit else "free memory"
    return f"{more}, use a smaller model or smaller -b and -ub"


def context_limit(plan: RunPlan) -> int:
    """Most positions of a session: those asked for, else what memory holds of those trained."""
    return plan.context_size or plan.most_context or plan.config.context_length


def least_context(plan: RunPlan) -> int:
    """Positions that any run needs: those asked for, else those of a short prompt."""
    limit = context_limit(plan)
    return min(MIN_DEFAULT_CONTEXT, limit) if plan.context_size is None else limit


def choose_context(
    plan: RunPlan, n_prompt_tokens: int, max_tokens: int, *, goes_on: bool = False
) -> int:
    """Positions to allocate for a prompt and its answer.

    The plan's ``context_size`` is taken as it is (0 = the trained length). Without it: what both
    need, at least ``MIN_DEFAULT_CONTEXT`` and at most the trained length, or what memory holds.
    Raises ContextLengthError, with a context that leaves room for the answer, when the prompt alone
    is longer, unless it ``goes_on`` past it.
    """
    trained = plan.config.context_length
    limit = context_limit(plan)
    context = least_context(plan)
    answer = OPEN_ANSWER_TOKENS if max_tokens < 0 else max_tokens
    if plan.context_size is None:
        needed = -(-(n_prompt_tokens + answer) // CONTEXT_STEP) * CONTEXT_STEP
        context = max(context, min(limit, needed))
    if n_prompt_tokens > context and not goes_on:
        wanted = n_prompt_tokens + answer
        cure = f"use -c {min(wanted, trained)} or more"
        if plan.most_context is not None:
            cure = f"memory has no room for more: shorten it, {memory_cures()}"
        elif n_prompt_tokens > trained and plan.config.most_positions:
            cure = f"shorten it: the model has a table of {trained} positions"
        elif n_prompt_tokens > trained:
            cure = (
                f"shorten it, or use -c {wanted} to read it all the same, beyond the {trained} "
                "positions that the model was trained on"
            )
            if plan.rope == ROPE_OF_FILE and plan.config.has_rope:
                scale = -(-wanted // trained)
                cure += f", perhaps with --rope-scaling yarn --rope-scale {scale}"
        message = f"the prompt has {n_prompt_tokens} tokens and the context holds {context}; {cure}"
        raise ContextLengthError(n_prompt_tokens, context, message)
    return context


def rotate_alike(config: ModelConfig, context: int, other: int) -> bool:
    """Whether sessions of so many positions each rotate keys alike, which LongRoPE may not."""
    if not isinstance(config, DecoderConfig) or not config.long_rope_inv_freq:
        return True
    return (context > config.long_rope_after) == (other > config.long_rope_after)

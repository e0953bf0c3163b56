"""In words: from which length on prompts are read sparse, and tokens after them read less."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..attention.headwise_settings import DECODE_FROM, DECODES_ALL, NOT_MEASURED
from .context_size import CONTEXT_STEP, context_limit
from .payoff import (
    DECODE_STEP,
    LEAST_DECODE_SAVING,
    LEAST_SAVING,
    WeighedModel,
    choose_decode,
    sparse_prefill_pays,
)

if TYPE_CHECKING:
    from .plan import RunPlan


def describe_lengths(plan: RunPlan, model: WeighedModel) -> dict[str, str]:
    """What ``inspect`` and ``/props`` say of it, beside the report of the attention.

    Nothing of rules whose speed is not known.
    """
    said = {"prompts": _of_prompts(plan, model), "generated_tokens": _of_decode(plan, model)}
    return {name: text for name, text in said.items() if text}


def _of_prompts(plan: RunPlan, model: WeighedModel) -> str:
    """Of lengths up to the longest context, by steps."""
    limit = context_limit(plan)
    lengths = sorted({*range(CONTEXT_STEP, limit, CONTEXT_STEP), limit})

    def pays(n_tokens: int) -> bool | None:
        return sparse_prefill_pays(plan.for_length(n_tokens), model, n_tokens)

    if pays(limit) is None:
        return "read everything" if plan.for_length(limit).attention.reads_all else ""
    saving = f"{100 * LEAST_SAVING:.0f} % of the time"
    least = bisect_left(lengths, True, key=lambda n: pays(n) is True)
    if least == len(lengths):
        return f"read everything up to {limit:,} tokens: less would save under {saving}"
    is_unknown = plan.for_length(limit).attention.reads_all
    learnt = ", once the model is profiled" if is_unknown else ""
    return (
        f"sparse in contexts of {lengths[least]:,} tokens and more{learnt}: from there on it is "
        f"estimated to save {saving}"
    )


def _of_decode(plan: RunPlan, model: WeighedModel) -> str:
    """Of prompts whose context is as long as they are, unless one was named."""
    limit = context_limit(plan)

    def decode_of(n_tokens: int) -> Mapping[str, Any]:
        length = n_tokens if plan.context_size is None else limit
        chosen = choose_decode(plan.for_length(length), model)
        return chosen.attention.report(plan.config, n_tokens)

    report = decode_of(limit)
    if "decode_from" not in report:
        return "read everything" if plan.settings.leaves_decode_open else ""
    if report["decode"] == DECODES_ALL:
        return (
            f"read everything: less would pay from {report['decode_from']:,} tokens on, beyond "
            "the context"
        )
    lengths = range(DECODE_FROM, limit + 1, DECODE_STEP)
    first = bisect_left(lengths, True, key=lambda n: decode_of(n)["decode"] != DECODES_ALL)
    least = lengths[first] if first < len(lengths) else limit
    if not plan.settings.leaves_decode_open:
        return f"read less of prompts of {least:,} tokens and more"
    saving = f"is estimated to save {100 * LEAST_DECODE_SAVING:.0f} % of their time"
    end = bisect_left(lengths, True, first, key=lambda n: decode_of(n)["decode"] == NOT_MEASURED)
    if end == first:
        return (
            f"read everything: from {least:,} tokens on less {saving}, but what it loses there was "
            "not measured"
        )
    if end == len(lengths):
        return f"read less of prompts of {least:,} tokens and more: from there on it {saving}"
    return (
        f"read less of prompts of {least:,} to {lengths[end - 1]:,} tokens: from there on it "
        f"{saving}, and beyond it was not measured what it loses"
    )

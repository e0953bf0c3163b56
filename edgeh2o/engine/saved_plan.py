"""By which plan a session file was made: what it says of that, and the plan of what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..attention.dense import DenseConfig
from ..attention.headwise_saved import saved_decode_from
from ..model_config import DecoderConfig
from ..option_fields import MAX_CONTEXT
from .models import fingerprint_at
from .precisions import AttentionPrecisions

if TYPE_CHECKING:
    from .models import DescribedModel
    from .plan import RunPlan

SCALES = "lora"  # in a fingerprint: what adapters count, which is part of its "model" too


def fingerprint_of(plan: RunPlan, model: DescribedModel) -> Mapping[str, Any]:
    """What a session file must agree with: the model and, budgets included, how it is run."""
    rope, config = plan.rope.to_dict(), plan.config
    is_balanced = False
    if isinstance(config, DecoderConfig) and not plan.is_on_gpu:
        # Such keys are cached in other sizes than on a GPU: cpp/model/key_balance.h.
        is_balanced = config.has_key_bias or config.qk_norm != "none"
    return {
        "model": fingerprint_at(model, plan.adapter_scales),
        **({"rope": rope} if rope else {}),
        **({SCALES: list(plan.adapter_scales)} if plan.adapter_scales else {}),
        **({"keys": "balanced"} if is_balanced else {}),
        "attention": plan.attention.to_dict(),
        "chunk_size": plan.chunk_size,
        "cache_type": plan.cache_type,
    }


def is_alike(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether two fingerprints, as they come out of files, are of the same model and run."""
    names = (saved.keys() | current.keys()) - {SCALES}
    no_value = object()
    return all(saved.get(name, no_value) == current.get(name) for name in names)


def plan_as_saved(plan: RunPlan, saved: Mapping[str, Any]) -> RunPlan:
    """The plan as a session file was made, by what ``read_settings`` gives of it.

    That is its budgets, its precision where it may be that of a prompt here too, and what adapters
    count.
    """
    precisions, precision = plan.precisions, saved.get("precision")
    plan = _with_saved_budgets(_with_saved_adapters(plan, saved), saved)
    if precision not in (precisions.exact, precisions.rounded):
        return plan  # of another machine, or asked for
    alone = AttentionPrecisions(precision, precision)
    return replace(plan, precision=precision, precisions=alone)


def _with_saved_budgets(plan: RunPlan, saved: Mapping[str, Any]) -> RunPlan:
    values, chunk_size = saved.get("attention"), saved.get("chunk_size")
    if not isinstance(values, Mapping) or values.get("algorithm") != plan.settings.algorithm:
        return plan
    attention = plan.settings.holding({**values, "is_taught": saved.get("is_taught")})
    if attention is plan.settings or not attention.fits(plan.config):
        return plan
    # Those of a file that was written elsewhere, on a GPU or a CPU, too.
    sizes = [DenseConfig.preferred_chunk_size, attention.preferred_chunk_size]
    possible = plan.free_chunks(*sizes, attention.gpu_chunk_size or sizes[0])
    if not isinstance(chunk_size, int) or chunk_size not in possible:
        return plan
    held = replace(
        plan,
        settings=attention,
        attention=attention.resolved(plan.config),
        chunk_size=chunk_size,
    )
    return replace(_for_saved_length(held, values), settings=plan.settings)


def plan_of_fingerprint(
    plan: RunPlan, saved: Mapping[str, Any], model: DescribedModel
) -> RunPlan | None:
    """By the fingerprint of a session file: the plan, for a prompt as long as its own.

    Or for one that was read dense, as sparse would not have been faster. None for a file of
    another model, or that was run otherwise.
    """
    values = saved.get("attention")
    plan = _with_saved_adapters(plan, saved)
    own = _for_saved_length(plan, values) if isinstance(values, Mapping) else plan
    plans = [own, plan.reading_all(saves_time=True)]
    if isinstance(values, Mapping) and plan.settings.leaves_decode_open:
        least = saved_decode_from(values)
        plans = [replace(each, attention=each.attention.decoding_from(least)) for each in plans]
    for each in plans:
        # As it comes out of a file.
        if is_alike(json.loads(json.dumps(fingerprint_of(each, model))), saved):
            return each
    return None


def _with_saved_adapters(plan: RunPlan, saved: Mapping[str, Any]) -> RunPlan:
    """The plan with the scales of adapters that a fingerprint names, if there are as many.

    Older files name none where they were those of the flags.
    """
    scales = saved.get(SCALES)
    if not isinstance(scales, list) or not all(type(scale) is float for scale in scales):
        return plan
    if len(scales) != len(plan.adapter_scales):
        return plan
    return replace(plan, adapter_scales=tuple(scales))


def _for_saved_length(plan: RunPlan, values: Mapping[str, Any]) -> RunPlan:
    """The plan with the budget of a longer prompt, if a saved attention has that.

    Whether it has it in the same heads its fingerprint tells.
    """
    saved, shortest = values.get("budget"), plan.settings.budget_for(plan.attention, 0)
    if type(saved) is not int or shortest is None or not shortest < saved <= MAX_CONTEXT:
        return plan
    return plan.with_budget(saved)

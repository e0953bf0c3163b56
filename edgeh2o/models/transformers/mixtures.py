"""Mixtures of experts that hold several matrices in one tensor: see ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import BASE, EXPERT_KEYS, TransformersFamily
from .settings import Settings
from .sources import Source, Sources, every_first, every_second, first_half, second_half

_PREFIX = "model.layers.{layer}."
_GPT_OSS_EXPERTS = _PREFIX + "mlp.experts."


def _gpt_oss_matrix(name: str, rows: Any) -> tuple[Source, Source]:
    """As blocks, or as what a row of inputs is multiplied by from the left."""
    return (
        Source(name=f"{_GPT_OSS_EXPERTS}{name}_blocks", rows=rows, scales="_scales"),
        Source(name=_GPT_OSS_EXPERTS + name, columns=rows, is_transposed=True),
    )


_GPT_OSS: Mapping[str, Sources] = {
    **{name: source for name, source in BASE.items() if not name.endswith("ffn_norm")},
    "blk.{layer}.post_attention_norm": _PREFIX + "post_attention_layernorm",
    "blk.{layer}.attn_sinks.weight": Source(name=_PREFIX + "self_attn.sinks"),
    "blk.{layer}.ffn_gate_inp": _PREFIX + "mlp.router",
    "blk.{layer}.ffn_gate_exps.weight": _gpt_oss_matrix("gate_up_proj", every_first),
    "blk.{layer}.ffn_up_exps.weight": _gpt_oss_matrix("gate_up_proj", every_second),
    "blk.{layer}.ffn_down_exps.weight": _gpt_oss_matrix("down_proj", None),
    "blk.{layer}.ffn_gate_exps.bias": Source(
        name=_GPT_OSS_EXPERTS + "gate_up_proj_bias", columns=every_first
    ),
    "blk.{layer}.ffn_up_exps.bias": Source(
        name=_GPT_OSS_EXPERTS + "gate_up_proj_bias", columns=every_second
    ),
    "blk.{layer}.ffn_down_exps.bias": Source(name=_GPT_OSS_EXPERTS + "down_proj_bias"),
}


def _read_gpt_oss(settings: Settings, keys: dict[str, Any]) -> None:
    keys["expert_feed_forward_length"] = keys["feed_forward_length"]


GRANITE_KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
GRANITE_EXPERTS: Mapping[str, Sources] = {
    "blk.{layer}.ffn_gate_inp": _PREFIX + "block_sparse_moe.router.layer",
    "blk.{layer}.ffn_gate_exps.weight": Source(
        name=_PREFIX + "block_sparse_moe.input_linear.weight", rows=first_half
    ),
    "blk.{layer}.ffn_up_exps.weight": Source(
        name=_PREFIX + "block_sparse_moe.input_linear.weight", rows=second_half
    ),
    "blk.{layer}.ffn_down_exps": _PREFIX + "block_sparse_moe.output_linear",
}


def granite_shared(name: str) -> Mapping[str, Sources]:
    """The network of all tokens, whose tensors end in ``name`` in GGUF."""
    return {
        f"blk.{{layer}}.ffn_gate{name}.weight": Source(
            name=_PREFIX + "shared_mlp.input_linear.weight", rows=first_half
        ),
        f"blk.{{layer}}.ffn_up{name}.weight": Source(
            name=_PREFIX + "shared_mlp.input_linear.weight", rows=second_half
        ),
        f"blk.{{layer}}.ffn_down{name}": _PREFIX + "shared_mlp.output_linear",
    }


_GRANITE: Mapping[str, Sources] = {**BASE, **GRANITE_EXPERTS}

MIXTURES: Mapping[str, TransformersFamily] = {
    "gpt_oss": TransformersFamily(
        architecture="gpt-oss",
        tensors=_GPT_OSS,
        keys=EXPERT_KEYS,
        values={"swiglu_limit": (7.0, 7, None), "swiglu_alpha": (1.702, None)},
        ignored=("experts_per_token", "initial_context_length"),
        has_windows=True,
        needs_windows=True,
        has_exact_yarn=True,
        read_more=_read_gpt_oss,
        has_mxfp4=True,
    ),
    "granitemoe": TransformersFamily(
        architecture="granitemoe", tensors=_GRANITE, keys={**GRANITE_KEYS, **EXPERT_KEYS}
    ),
    "granitemoeshared": TransformersFamily(
        architecture="granitemoe",
        tensors={**_GRANITE, **granite_shared("_shexp")},
        keys={
            **GRANITE_KEYS,
            **EXPERT_KEYS,
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
}

"""Mixtures of experts that hold several matrices in one tensor: see ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import BASE, EXPERT_KEYS, EXPERTS, GATED, TransformersFamily
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


_ERNIE: Mapping[str, Sources] = {
    **BASE,
    **GATED,  # of the first layers
    **EXPERTS,
    "blk.{layer}.exp_probs_b.bias": Source(
        name=_PREFIX + "mlp.moe_statics.e_score_correction_bias"
    ),
    **{
        f"blk.{{layer}}.ffn_{part}_shexp": f"{_PREFIX}mlp.shared_experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
}


def _read_ernie(settings: Settings, keys: dict[str, Any]) -> None:
    n_layers, width = keys["block_count"], settings.integer("moe_intermediate_size")
    settings.require("moe_layer_end_index", (-1, n_layers - 1, None))
    n_shared = settings.count("moe_num_shared_experts", default=2)
    keys |= {
        "expert_feed_forward_length": width,
        "expert_shared_count": n_shared,
        "expert_shared_feed_forward_length": n_shared * width,
        "leading_dense_block_count": settings.count("moe_layer_start_index", default=1),
        "interleave_moe_layer_step": 1,
    }


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
        defaults={
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        values={"swiglu_limit": (7.0, 7, None), "swiglu_alpha": (1.702, None)},
        ignored=("experts_per_token", "initial_context_length"),
        has_windows=True,
        needs_windows=True,
        has_exact_yarn=True,
        read_more=_read_gpt_oss,
        has_mxfp4=True,
    ),
    "ernie4_5_moe": TransformersFamily(
        architecture="ernie4_5-moe",
        tensors=_ERNIE,
        has_half_split_rows=False,
        ties_by_default=True,
        renamed={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        keys=EXPERT_KEYS,
        defaults={"rope_theta": 500000.0},
        values={
            "use_bias": (False, None),
            "moe_layer_interval": (1, None),
            "moe_gate": ("topk", None),
            "moe_norm_min": (1e-12, None),
        },
        ignored=(
            *("moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers"),
            *("hidden_dropout_prob", "attention_probs_dropout_prob"),
        ),
        read_more=_read_ernie,
        left_out=("model.mtp_",),
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

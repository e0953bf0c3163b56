"""What a ``model_type`` of transformers is in the words of GGUF, and names that many share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .settings import Settings
from .sources import Factors, Sources

# Reads keys of config.json that only some have, and adds to those of GGUF, or changes them. Returns
# factors by the names that sources have for them, if there are some.
ReadMore: TypeAlias = Callable[[Settings, dict[str, Any]], Mapping[str, Factors] | None]

# GGUF's name of a tensor, and that of the checkpoint: without .weight or .bias, which both have.
BASE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{layer}.attn_norm": "model.layers.{layer}.input_layernorm",
    "blk.{layer}.ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.attn_q": "model.layers.{layer}.self_attn.q_proj",
    "blk.{layer}.attn_k": "model.layers.{layer}.self_attn.k_proj",
    "blk.{layer}.attn_v": "model.layers.{layer}.self_attn.v_proj",
    "blk.{layer}.attn_output": "model.layers.{layer}.self_attn.o_proj",
}
GATED = {
    "blk.{layer}.ffn_gate": "model.layers.{layer}.mlp.gate_proj",
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.up_proj",
    "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
}
UNGATED = {name: source for name, source in GATED.items() if not name.endswith("gate")}
QK_NORMS = {
    "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
    "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
}
# One matrix per expert there, one tensor of all of them in GGUF.
EXPERTS = {
    "blk.{layer}.ffn_gate_inp": "model.layers.{layer}.mlp.gate",
    "blk.{layer}.ffn_gate_exps": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
    "blk.{layer}.ffn_up_exps": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
    "blk.{layer}.ffn_down_exps": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
}
SHARED_EXPERT = {
    "blk.{layer}.ffn_gate_shexp": "model.layers.{layer}.mlp.shared_expert.gate_proj",
    "blk.{layer}.ffn_up_shexp": "model.layers.{layer}.mlp.shared_expert.up_proj",
    "blk.{layer}.ffn_down_shexp": "model.layers.{layer}.mlp.shared_expert.down_proj",
    "blk.{layer}.ffn_gate_inp_shexp": "model.layers.{layer}.mlp.shared_expert_gate",
}
# Of the texts of models of images, by who wrote the checkpoint.
TEXT_PREFIXES: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
VISION = (
    *("model.visual.", "visual.", "model.vision_tower.", "vision_tower."),
    *("model.multi_modal_projector.", "multi_modal_projector."),
)
NO_WINDOWS = {"use_sliding_window": (False, None)}
EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
WIDE_EXPERT_KEYS = {**EXPERT_KEYS, "moe_intermediate_size": "expert_feed_forward_length"}
SPARSE_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    **NO_WINDOWS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersFamily:
    """One ``model_type``.

    Attributes:
        architecture: its name in GGUF.
        tensors: names of the checkpoint by those of GGUF, whole or without .weight and .bias.
        activations: values of ``hidden_act`` that are the architecture's.
        has_half_split_rows: pairs of rotated rows lie as halves of a head, as in nearly all models
            of transformers, whatever GGUF has.
        adds_one: norms multiply by one more than their weights.
        ties_by_default: the output is the embedding where config.json does not say.
        keys: keys of config.json with numbers, and their suffixes in GGUF; a count where the
            suffix ends in "count" or "length".
        defaults: what keys of config.json are where they are missing.
        values: keys that must have one of these values where they are there.
        has_windows: ``sliding_window`` and ``layer_types`` say which layers have a window.
        needs_windows: ``sliding_window`` must be there, be it null: transformers would set one.
        has_query_scalar: ``query_pre_attn_scalar`` must be what the architecture assumes.
        renamed: keys of config.json that are called otherwise here.
        absent: keys of every decoder that this one does not have.
        ignored: keys of config.json that say nothing about what is computed, or repeat others.
        rope_keys: such keys of its rotary embedding.
        has_exact_yarn: its ramp of YaRN is not rounded to whole pairs.
        layer_types: values of ``layer_types`` beside those of attention.
        read_more: reads further keys.
        has_mxfp4: experts may be stored as blocks of MXFP4.
        has_drafting_layers: layers behind the last guess tokens ahead, and are left out.
        layer_numbers: numbers that checkpoints have as a tensor per layer, by GGUF's key.
        unties: an output that is the embedding becomes a matrix of its own.
        rotary_share: ``partial_rotary_factor`` where it is not given.
        norm_eps: epsilon of the norms where config.json has no key for it.
        prefixes: beginnings of names in some checkpoints, and what they are in others.
        has_rope_alpha: the base may be stretched by ``alpha``, which is called dynamic there.
        left_out: beginnings of names of tensors that texts do without.
    """

    architecture: str
    tensors: Mapping[str, Sources]
    activations: tuple[str, ...] = ("silu", "swish")
    has_half_split_rows: bool = True
    adds_one: bool = False
    ties_by_default: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    has_windows: bool = False
    needs_windows: bool = False
    has_query_scalar: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    rope_keys: tuple[str, ...] = ()
    has_exact_yarn: bool = False
    layer_types: tuple[str, ...] = ()
    read_more: ReadMore | None = None
    has_mxfp4: bool = False
    has_drafting_layers: bool = False
    layer_numbers: Mapping[str, str] = field(default_factory=dict)
    unties: bool = False
    rotary_share: float = 1.0
    norm_eps: float | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    has_rope_alpha: bool = False
    left_out: tuple[str, ...] = ()

"""Which models of transformers are which architectures, and what their tensors are called.

A family is one table: the names of its tensors, and the keys of config.json that it has beside
those of every decoder. The names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# GGUF's name of a tensor, and that of the checkpoint: without .weight or .bias, which both have.
_BASE = {
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
_GATED = {
    "blk.{layer}.ffn_gate": "model.layers.{layer}.mlp.gate_proj",
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.up_proj",
    "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
}
_QK_NORMS = {
    "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
    "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
}
# One matrix per expert there, one tensor of all of them in GGUF.
_EXPERTS = {
    "blk.{layer}.ffn_gate_inp": "model.layers.{layer}.mlp.gate",
    "blk.{layer}.ffn_gate_exps": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
    "blk.{layer}.ffn_up_exps": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
    "blk.{layer}.ffn_down_exps": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
}
_SHARED_EXPERT = {
    "blk.{layer}.ffn_gate_shexp": "model.layers.{layer}.mlp.shared_expert.gate_proj",
    "blk.{layer}.ffn_up_shexp": "model.layers.{layer}.mlp.shared_expert.up_proj",
    "blk.{layer}.ffn_down_shexp": "model.layers.{layer}.mlp.shared_expert.down_proj",
    "blk.{layer}.ffn_gate_inp_shexp": "model.layers.{layer}.mlp.shared_expert_gate",
}
_UNGATED = {name: source for name, source in _GATED.items() if not name.endswith("gate")}
_POST_NORMS = {
    "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
_GEMMA_NORMS = {
    "blk.{layer}.ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    **_POST_NORMS,
}
_POST_NORMED = {
    **{name: source for name, source in _BASE.items() if "norm" not in name},
    "output_norm": "model.norm",
    **_POST_NORMS,
    **_GATED,
    **_QK_NORMS,
}
_FUSED_GATED = {
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.gate_up_proj",
    "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
}
_FUSED = {
    "blk.{layer}.attn_qkv": "model.layers.{layer}.self_attn.qkv_proj",
    **_FUSED_GATED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersFamily:
    """One ``model_type``.

    Attributes:
        architecture: its name in GGUF.
        tensors: names of the checkpoint by those of GGUF.
        activations: values of ``hidden_act`` that are the architecture's.
        has_half_split_rows: pairs of rotated rows lie as halves of a head, as in nearly all models
            of transformers, whatever GGUF has.
        adds_one: norms multiply by one more than their weights.
        ties_by_default: the output is the embedding where config.json does not say.
        keys: keys of config.json with numbers, and their suffixes in GGUF; a count where the
            suffix ends in "count" or "length".
        values: keys that must have one of these values where they are there.
        has_windows: ``sliding_window`` and ``layer_types`` say which layers have a window.
        needs_windows: ``sliding_window`` must be there, be it null: transformers would set one.
        has_query_scalar: ``query_pre_attn_scalar`` must be what the architecture assumes.
    """

    architecture: str
    tensors: Mapping[str, str]
    activations: tuple[str, ...] = ("silu", "swish")
    has_half_split_rows: bool = True
    adds_one: bool = False
    ties_by_default: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    has_windows: bool = False
    needs_windows: bool = False
    has_query_scalar: bool = False


_GELU = ("gelu_pytorch_tanh", "gelu_tanh")
_NO_WINDOWS = {"use_sliding_window": (False, None)}
_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
_WIDE_EXPERT_KEYS = {**_EXPERT_KEYS, "moe_intermediate_size": "expert_feed_forward_length"}
_SPARSE_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    **_NO_WINDOWS,
}

FAMILIES: Mapping[str, TransformersFamily] = {
    "llama": TransformersFamily(architecture="llama", tensors={**_BASE, **_GATED}),
    "mistral": TransformersFamily(
        architecture="llama", tensors={**_BASE, **_GATED}, has_windows=True
    ),
    "smollm3": TransformersFamily(
        architecture="smollm3",
        tensors={**_BASE, **_GATED},
        ties_by_default=True,
        values={"no_rope_layer_interval": (4,), **_NO_WINDOWS},
    ),
    "qwen2": TransformersFamily(
        architecture="qwen2", tensors={**_BASE, **_GATED}, values=_NO_WINDOWS
    ),
    "qwen3": TransformersFamily(
        architecture="qwen3", tensors={**_BASE, **_GATED, **_QK_NORMS}, values=_NO_WINDOWS
    ),
    "qwen2_moe": TransformersFamily(
        architecture="qwen2moe",
        tensors={**_BASE, **_EXPERTS, **_SHARED_EXPERT},
        keys={
            **_WIDE_EXPERT_KEYS,
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        values={"norm_topk_prob": (False,), **_SPARSE_EVERYWHERE},
    ),
    "qwen3_moe": TransformersFamily(
        architecture="qwen3moe",
        tensors={**_BASE, **_EXPERTS, **_QK_NORMS},
        keys=_WIDE_EXPERT_KEYS,
        values={"norm_topk_prob": (True,), **_SPARSE_EVERYWHERE},
    ),
    "olmoe": TransformersFamily(
        architecture="olmoe",
        tensors={**_BASE, **_EXPERTS, **_QK_NORMS},
        keys=_EXPERT_KEYS,
        values={"norm_topk_prob": (False, None), "clip_qkv": (None,)},
    ),
    "olmo2": TransformersFamily(architecture="olmo2", tensors=_POST_NORMED),
    "olmo3": TransformersFamily(
        architecture="olmo2",
        tensors=_POST_NORMED,
        # Layers with a window have this base in transformers, whatever rope_theta says.
        values={"rope_theta": (500000.0, None)},
        has_windows=True,
        needs_windows=True,
    ),
    "exaone4": TransformersFamily(
        architecture="exaone4", tensors=_POST_NORMED, has_windows=True, needs_windows=True
    ),
    "arcee": TransformersFamily(
        architecture="arcee", tensors={**_BASE, **_UNGATED}, activations=("relu2",)
    ),
    "phi3": TransformersFamily(
        architecture="phi3",
        tensors={
            **{n: source for n, source in _BASE.items() if not n.endswith(("_q", "_k", "_v"))},
            **_FUSED,
        },
        values={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
        has_windows=True,
    ),
    "glm4": TransformersFamily(
        architecture="glm4",
        tensors={
            **_BASE,
            "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_self_attn_layernorm",
            "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_mlp_layernorm",
            **_FUSED_GATED,
        },
        has_half_split_rows=False,
    ),
    "ernie4_5": TransformersFamily(
        architecture="ernie4_5",
        tensors={**_BASE, **_GATED},
        has_half_split_rows=False,
        ties_by_default=True,
        values={"use_bias": (False, None)},
    ),
    "seed_oss": TransformersFamily(
        architecture="seed_oss",
        tensors={
            **{name: source for name, source in _BASE.items() if not name.endswith("ffn_norm")},
            "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
            **_GATED,
        },
        values={"attention_out_bias": (False, None)},
    ),
    "granite": TransformersFamily(
        architecture="granite",
        tensors={**_BASE, **_GATED},
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "gemma": TransformersFamily(
        architecture="gemma",
        tensors={**_BASE, **_GATED},
        activations=(*_GELU, "gelu"),  # what the first files called it
        adds_one=True,
        ties_by_default=True,
    ),
    "gemma2": TransformersFamily(
        architecture="gemma2",
        tensors={**_BASE, **_GATED, **_GEMMA_NORMS},
        activations=_GELU,
        adds_one=True,
        ties_by_default=True,
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        has_windows=True,
        has_query_scalar=True,
    ),
    "gemma3_text": TransformersFamily(
        architecture="gemma3",
        tensors={**_BASE, **_GATED, **_GEMMA_NORMS, **_QK_NORMS},
        activations=_GELU,
        adds_one=True,
        ties_by_default=True,
        values={
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        has_windows=True,
        has_query_scalar=True,
    ),
}


def expected_values(family: TransformersFamily) -> Mapping[str, tuple[object, ...]]:
    """Keys whose value changes what is computed, with those that are computed here."""
    return {**_EVERYWHERE, **family.values}


_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False, None),
    "num_nextn_predict_layers": (0, None),
}

"""Which models of transformers are which architectures, and what their tensors are called.

A family is one table: the names of its tensors, and the keys of config.json that it has beside
those of every decoder. The names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

from .family import (
    BASE,
    EXPERT_KEYS,
    EXPERTS,
    GATED,
    NO_WINDOWS,
    QK_NORMS,
    SHARED_EXPERT,
    SPARSE_EVERYWHERE,
    TEXT_PREFIXES,
    UNGATED,
    VISION,
    WIDE_EXPERT_KEYS,
    TransformersFamily,
)
from .gemma4 import GEMMA4
from .latent import LATENT
from .layer_normed import LAYER_NORMED
from .mamba2 import MAMBA2
from .mistral import MISTRAL
from .mixtures import GRANITE_KEYS, MIXTURES
from .qwen_vl import QWEN_VL
from .recurrent import RECURRENT

_POST_NORMS = {
    "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
_GEMMA_NORMS = {
    "blk.{layer}.ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    **_POST_NORMS,
}
_POST_NORMED = {
    **{name: source for name, source in BASE.items() if "norm" not in name},
    "output_norm": "model.norm",
    **_POST_NORMS,
    **GATED,
    **QK_NORMS,
}
_FUSED_GATED = {
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.gate_up_proj",
    "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.down_proj",
}
_FUSED = {
    "blk.{layer}.attn_qkv": "model.layers.{layer}.self_attn.qkv_proj",
    **_FUSED_GATED,
}


# The texts of Gemma 3 4B say what is otherwise there, and nothing else.
_GEMMA3_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
}
_GELU = ("gelu_pytorch_tanh", "gelu_tanh")

FAMILIES: Mapping[str, TransformersFamily] = {
    **RECURRENT,
    **GEMMA4,
    **LATENT,
    **MAMBA2,
    **LAYER_NORMED,
    **MIXTURES,
    **MISTRAL,
    **QWEN_VL,
    "llama": TransformersFamily(architecture="llama", tensors={**BASE, **GATED}),
    "hunyuan_v1_dense": TransformersFamily(
        architecture="hunyuan-dense",
        tensors={
            **BASE,
            **GATED,
            "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.query_layernorm",
            "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.key_layernorm",
        },
        values={
            "use_qk_norm": (True, None),
            "use_cla": (False, None),
            "use_mla": (False, None),
            "num_experts": (1, None),
            "norm_type": ("rms", "hf_rms", None),
            "add_classification_head": (False, None),
        },
        ignored=(
            *("eod_token_id", "pad_id", "mask_init_id", "im_start_id", "im_end_id"),
            *("im_newline_id", "text_start_id", "text_end_id", "attention_head_dim"),
            *("cla_share_factor", "class_num", "dense_list", "org_vocab_size", "pool_type"),
        ),
        has_rope_alpha=True,
    ),
    "smollm3": TransformersFamily(
        architecture="smollm3",
        tensors={**BASE, **GATED},
        ties_by_default=True,
        defaults={"rope_theta": 2e6},
        values={"no_rope_layer_interval": (4,), **NO_WINDOWS},
    ),
    "qwen2": TransformersFamily(architecture="qwen2", tensors={**BASE, **GATED}, values=NO_WINDOWS),
    "qwen3": TransformersFamily(
        architecture="qwen3", tensors={**BASE, **GATED, **QK_NORMS}, values=NO_WINDOWS
    ),
    "qwen2_moe": TransformersFamily(
        architecture="qwen2moe",
        tensors={**BASE, **EXPERTS, **SHARED_EXPERT},
        keys={
            **WIDE_EXPERT_KEYS,
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        values={"norm_topk_prob": (False,), **SPARSE_EVERYWHERE},
    ),
    "qwen3_moe": TransformersFamily(
        architecture="qwen3moe",
        tensors={**BASE, **EXPERTS, **QK_NORMS},
        keys=WIDE_EXPERT_KEYS,
        defaults={"norm_topk_prob": False},  # which is refused
        values={"norm_topk_prob": (True,), **SPARSE_EVERYWHERE},
    ),
    "olmoe": TransformersFamily(
        architecture="olmoe",
        tensors={**BASE, **EXPERTS, **QK_NORMS},
        keys=EXPERT_KEYS,
        values={"norm_topk_prob": (False, None), "clip_qkv": (None,)},
    ),
    "olmo2": TransformersFamily(architecture="olmo2", tensors=_POST_NORMED),
    "olmo3": TransformersFamily(
        architecture="olmo2",
        tensors=_POST_NORMED,
        # Layers with a window have this base in transformers, whatever rope_theta says.
        defaults={"rope_theta": 500000.0},
        values={"rope_theta": (500000.0, None)},
        has_windows=True,
        needs_windows=True,
    ),
    "exaone4": TransformersFamily(
        architecture="exaone4", tensors=_POST_NORMED, has_windows=True, needs_windows=True
    ),
    "apertus": TransformersFamily(
        architecture="apertus",
        tensors={
            **BASE,
            "blk.{layer}.attn_norm": "model.layers.{layer}.attention_layernorm",
            "blk.{layer}.ffn_norm": "model.layers.{layer}.feedforward_layernorm",
            **UNGATED,
            **QK_NORMS,
        },
        activations=("xielu",),
        defaults={
            "rope_theta": 12e6,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        values={"post_norm": (False, None), "qk_norm": (True, None)},
        layer_numbers={
            f"xielu.{name}": f"model.layers.{{layer}}.mlp.act_fn.{name}"
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        },
    ),
    "arcee": TransformersFamily(
        architecture="arcee", tensors={**BASE, **UNGATED}, activations=("relu2",)
    ),
    "phi3": TransformersFamily(
        architecture="phi3",
        tensors={
            **{n: source for n, source in BASE.items() if not n.endswith(("_q", "_k", "_v"))},
            **_FUSED,
        },
        defaults={"original_max_position_embeddings": 4096},
        values={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
        has_windows=True,
    ),
    "glm4": TransformersFamily(
        architecture="glm4",
        tensors={
            **BASE,
            "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_self_attn_layernorm",
            "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_mlp_layernorm",
            **_FUSED_GATED,
        },
        has_half_split_rows=False,
        rotary_share=0.5,
    ),
    "ernie4_5": TransformersFamily(
        architecture="ernie4_5",
        tensors={**BASE, **GATED},
        has_half_split_rows=False,
        ties_by_default=True,
        defaults={"rope_theta": 500000.0},
        values={"use_bias": (False, None)},
    ),
    "seed_oss": TransformersFamily(
        architecture="seed_oss",
        tensors={
            **{name: source for name, source in BASE.items() if not name.endswith("ffn_norm")},
            "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
            **GATED,
        },
        values={"attention_out_bias": (False, None)},
    ),
    "granite": TransformersFamily(
        architecture="granite",
        tensors={**BASE, **GATED},
        keys=GRANITE_KEYS,
    ),
    "gemma": TransformersFamily(
        architecture="gemma",
        tensors={**BASE, **GATED},
        activations=(*_GELU, "gelu"),  # what the first files called it
        adds_one=True,
        ties_by_default=True,
    ),
    "gemma2": TransformersFamily(
        architecture="gemma2",
        tensors={**BASE, **GATED, **_GEMMA_NORMS},
        activations=_GELU,
        adds_one=True,
        ties_by_default=True,
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults={"query_pre_attn_scalar": 256},
        has_windows=True,
        has_query_scalar=True,
    ),
    "gemma3_text": TransformersFamily(
        architecture="gemma3",
        tensors={**BASE, **GATED, **_GEMMA_NORMS, **QK_NORMS},
        activations=_GELU,
        adds_one=True,
        ties_by_default=True,
        values={
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        defaults=_GEMMA3_DEFAULTS,
        has_windows=True,
        has_query_scalar=True,
        prefixes=TEXT_PREFIXES,
        left_out=VISION,
    ),
}


# Models of images and texts, by what the part for texts may be, first what it is by default.
TEXT_TYPES: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "mistral3": ("ministral3", "mistral"),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3_vl_text",),
}


def expected_values(family: TransformersFamily) -> Mapping[str, tuple[object, ...]]:
    """Keys whose value changes what is computed, with those that are computed here."""
    expected = {**_EVERYWHERE, **family.values}
    return {key: values for key, values in expected.items() if key not in family.ignored}


_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False, None),
    "num_nextn_predict_layers": (0, None),
}

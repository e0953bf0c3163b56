"""Models of transformers with LayerNorm: see ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping

from .family import BASE, GATED, TransformersFamily

_GELU = ("gelu_pytorch_tanh", "gelu_tanh")

_ONE_NORM = {
    **{name: source for name, source in BASE.items() if not name.endswith("ffn_norm")},
    **GATED,
}

LAYER_NORMED: Mapping[str, TransformersFamily] = {
    "cohere": TransformersFamily(
        architecture="command-r",
        tensors=_ONE_NORM,
        has_half_split_rows=False,
        ties_by_default=True,
        renamed={"layer_norm_eps": "rms_norm_eps"},
        keys={"logit_scale": "logit_scale"},
        values={"use_qk_norm": (False, None)},
        ignored=("model_max_length",),
    ),
    "cohere2": TransformersFamily(
        architecture="cohere2",
        tensors=_ONE_NORM,
        has_half_split_rows=False,
        ties_by_default=True,
        renamed={"layer_norm_eps": "rms_norm_eps"},
        keys={"logit_scale": "logit_scale"},
        values={
            "use_qk_norm": (False, None),
            "use_parallel_block": (True, None),
            "use_gated_activation": (True, None),
            "position_embedding_type": ("rope_gptj", None),
            "order_of_interleaved_layers": ("local_attn_first", None),
            "rotary_pct": (1, 1.0, None),
        },
        ignored=("layer_switch", "use_embedding_sharing", "use_parallel_embedding"),
        has_windows=True,
        needs_windows=True,
    ),
    "starcoder2": TransformersFamily(
        architecture="starcoder2",
        tensors={
            **BASE,
            "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.c_fc",
            "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.c_proj",
        },
        activations=_GELU,
        ties_by_default=True,
        renamed={"norm_epsilon": "rms_norm_eps"},
        values={"mlp_type": ("default", None), "norm_type": ("layer_norm", None)},
        ignored=("embedding_dropout", "use_bias", "activation_function"),
        has_windows=True,
    ),
    "stablelm": TransformersFamily(
        architecture="stablelm",
        tensors={**BASE, **GATED},
        renamed={"layer_norm_eps": "rms_norm_eps"},
        values={"qk_layernorm": (False, None), "use_parallel_residual": (False, None)},
        ignored=("use_qkv_bias",),
        rotary_share=0.25,
    ),
}

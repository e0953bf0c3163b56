"""Models of transformers with LayerNorm: see ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import FormatError
from .family import BASE, GATED, TransformersFamily
from .settings import Settings

_GELU = ("gelu_pytorch_tanh", "gelu_tanh")

_ONE_NORM = {
    **{name: source for name, source in BASE.items() if not name.endswith("ffn_norm")},
    **GATED,
}


def _read_limit(settings: Settings, keys: dict[str, Any]) -> None:
    """The limit of queries, keys and values, if there is one."""
    limit = settings.number("clip_qkv", default=None)
    if limit is None:
        return
    if limit <= 0.0:  # which GGUF has for none
        raise FormatError(f"{settings.label('clip_qkv')} is {limit:g}, but must be above 0")
    keys["attention.clamp_kqv"] = limit


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
    "olmo": TransformersFamily(
        architecture="olmo",
        tensors={name: source for name, source in {**BASE, **GATED}.items() if "norm" not in name},
        norm_epsilon=1e-5,  # which transformers has in its code
        values={"rms_norm_eps": (1e-5, None)},
        rotates_whole_heads=True,
        read_more=_read_limit,
    ),
    "phi": TransformersFamily(
        architecture="phi2",
        tensors={
            **{name: source for name, source in BASE.items() if not name.endswith("ffn_norm")},
            "output_norm": "model.final_layernorm",
            "blk.{layer}.attn_output": "model.layers.{layer}.self_attn.dense",
            "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.fc1",
            "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.fc2",
        },
        activations=("gelu_new", "gelu_fast", *_GELU),
        renamed={"layer_norm_eps": "rms_norm_eps"},
        values={
            "qk_layernorm": (False, None),
            # llama.cpp reads no file of it without an output of its own.
            "tie_word_embeddings": (False, None),
        },
        rotary_share=0.5,
    ),
}

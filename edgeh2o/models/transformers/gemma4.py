"""Gemma 4's texts, without experts: see ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import FormatError
from .family import BASE, GATED, QK_NORMS, TEXT_PREFIXES, TransformersFamily
from .recurrent import integers
from .settings import Settings
from .sources import Source, Sources

_PREFIX = "model.layers.{layer}."
_TENSORS: Mapping[str, Sources] = {
    **BASE,
    **GATED,
    **QK_NORMS,
    "blk.{layer}.ffn_norm": _PREFIX + "pre_feedforward_layernorm",
    "blk.{layer}.post_attention_norm": _PREFIX + "post_attention_layernorm",
    "blk.{layer}.post_ffw_norm": _PREFIX + "post_feedforward_layernorm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "blk.{layer}.inp_gate": _PREFIX + "per_layer_input_gate",
    "blk.{layer}.proj": _PREFIX + "per_layer_projection",
    "blk.{layer}.post_norm": _PREFIX + "post_per_layer_input_norm",
    "blk.{layer}.layer_output_scale.weight": Source(name=_PREFIX + "layer_scalar"),
}


def _read_gemma4(settings: Settings, keys: dict[str, Any]) -> None:
    n_layers = keys["block_count"]
    kinds = settings.take("layer_types")
    if kinds is None:
        raise FormatError(f"{settings.label('layer_types')} is missing")
    sliding_dim, n_kv_heads = keys["attention.key_length"], keys["attention.head_count_kv"]
    full = _read_full_layers(settings, kinds)
    head_dim = full.get("head_dim", sliding_dim)
    keys |= {
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.key_length_swa": sliding_dim,
        "attention.value_length_swa": sliding_dim,
        "rope.dimension_count": head_dim,
        "rope.dimension_count_swa": sliding_dim,
        "attention.head_count_kv": integers(
            [
                full.get("num_key_value_heads", n_kv_heads)
                if kind == "full_attention"
                else n_kv_heads
                for kind in kinds
            ]
        ),
    }
    n_shared = settings.count("num_kv_shared_layers", default=0)
    keys["attention.shared_kv_layers"] = n_shared
    width = settings.count("hidden_size_per_layer_input", default=0)
    keys["embedding_length_per_layer_input"] = width
    if width:
        settings.require("vocab_size_per_layer_input", (keys["vocab_size"], None))
    settings.take("vocab_size_per_layer_input")
    if settings.flag("use_double_wide_mlp"):
        width = keys["feed_forward_length"]
        keys["feed_forward_length"] = integers(
            [width * (1 + (layer >= n_layers - n_shared)) for layer in range(n_layers)]
        )
    cap = settings.number("final_logit_softcapping", default=None)
    if cap is not None:
        keys["final_logit_softcapping"] = cap


def _read_full_layers(settings: Settings, kinds: list[str]) -> dict[str, int]:
    """What layers without a window have of their own: the size of heads, and how many KV heads."""
    own: dict[str, int] = {}
    each = settings.take("per_layer_config")
    if each is None:
        if settings.take("global_head_dim") is not None:
            own["head_dim"] = settings.integer("global_head_dim")
        has_few = settings.flag("attention_k_eq_v")
        if settings.take("num_global_key_value_heads") is not None and has_few:
            own["num_key_value_heads"] = settings.integer("num_global_key_value_heads")
        return own
    settings.take("attention_k_eq_v")
    expected = {str(i) for i, kind in enumerate(kinds) if kind == "full_attention"}
    if not isinstance(each, dict) or set(each) != expected or not expected:
        raise FormatError(
            f"{settings.label('per_layer_config')} must be an object of the layers with full "
            "attention; other layers of their own are not supported"
        )
    first = each[min(expected)]
    known = ("head_dim", "num_key_value_heads")
    if any(layer != first for layer in each.values()) or not (
        isinstance(first, dict)
        and all(key in known and type(n) is int and n > 0 for key, n in first.items())
    ):
        raise FormatError(
            f"{settings.label('per_layer_config')} must have the same {' and '.join(known)} for "
            "all layers with full attention"
        )
    return dict(first)


GEMMA4: Mapping[str, TransformersFamily] = {
    "gemma4_text": TransformersFamily(
        architecture="gemma4",
        tensors=_TENSORS,
        activations=("gelu_pytorch_tanh",),
        ties_by_default=True,
        defaults={
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
            },
        },
        values={
            "enable_moe_block": (False, None),
            "use_bidirectional_attention": (None, False, "vision"),
        },
        ignored=(
            "moe_intermediate_size",
            "num_experts",
            "top_k_experts",
            "expert_intermediate_size",
        ),
        has_windows=True,
        needs_windows=True,
        read_more=_read_gemma4,
        prefixes=TEXT_PREFIXES,
        left_out=(
            "model.vision_tower.",
            "model.audio_tower.",
            "model.embed_vision.",
            "model.embed_audio.",
        ),
    ),
}

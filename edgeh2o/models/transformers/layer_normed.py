"""Models of transformers with LayerNorm: see ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .family import BASE, GATED, TransformersFamily
from .settings import Settings
from .sources import Source, Sources

_GELU = ("gelu_pytorch_tanh", "gelu_tanh")
_NEW_GELU = ("gelu_new", "gelu_fast", *_GELU)  # other names of it
# GGUF files say nothing of the GELU, which is the one with a hyperbolic tangent for all.
_ANY_GELU = ("gelu", *_NEW_GELU)

_ONE_NORM = {
    **{name: source for name, source in BASE.items() if not name.endswith("ffn_norm")},
    **GATED,
}


def _grouped_rows(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    """Q, K and V one after the other, where every KV head lies behind the queries it is for."""
    if n != sizes["qkv_dim"]:
        raise ValueError(f"{n} rows are no {sizes['qkv_dim']} of queries, keys and values")
    head_dim = sizes["head_dim"]
    n_queries = sizes["q_dim"] // sizes["kv_dim"]
    heads = range(n // head_dim)
    place = [head % (n_queries + 2) for head in heads]
    queries = [head for head in heads if place[head] < n_queries]
    keys = [head for head in heads if place[head] == n_queries]
    values = [head for head in heads if place[head] == n_queries + 1]
    return [head * head_dim + row for head in queries + keys + values for row in range(head_dim)]


def _fused(name: str) -> Mapping[str, Sources]:
    return {
        f"blk.{{layer}}.attn_qkv.{part}": Source(name=f"{name}.{part}", rows=_grouped_rows)
        for part in ("weight", "bias")
    }


def _read_gpt_neox(settings: Settings, keys: dict[str, Any]) -> None:
    keys["use_parallel_residual"] = settings.flag("use_parallel_residual") is not False


def _read_falcon(settings: Settings, keys: dict[str, Any]) -> None:
    """Keys that some published files lack have the defaults of transformers."""
    n_heads, width = keys["attention.head_count"], keys["embedding_length"]
    keys["context_length"] = settings.integer("max_position_embeddings", default=2048)
    keys["feed_forward_length"] = settings.integer("ffn_hidden_size", default=4 * width)
    settings.require("ff_factor", (keys["feed_forward_length"] / width, None))
    has_groups = settings.flag("new_decoder_architecture")
    has_one_kv_head = settings.flag("multi_query") is not False
    settings.require("num_ln_in_parallel_attn", (1, 2, None) if has_groups else (1, None))
    if has_groups:
        return
    if has_one_kv_head:  # whatever num_kv_heads says
        keys["attention.head_count_kv"] = 1
    else:
        settings.require("num_key_value_heads", (n_heads, None))


def _read_olmo(settings: Settings, keys: dict[str, Any]) -> None:
    limit = settings.number("clip_qkv", default=None)
    if limit is not None:
        keys["attention.clamp_kqv"] = limit


def _read_bloom(settings: Settings, keys: dict[str, Any]) -> None:
    """Its networks are four times as wide; of the context most published files say something."""
    keys["context_length"] = settings.integer("seq_length", default=2048)
    keys["feed_forward_length"] = 4 * keys["embedding_length"]
    settings.require("n_inner", (keys["feed_forward_length"], None))


def _read_mpt(settings: Settings, keys: dict[str, Any]) -> None:
    """What transformers computes whatever the file says has to be what it says."""
    keys["feed_forward_length"] = 4 * keys["embedding_length"]
    keys["attention.max_alibi_bias"] = _MPT_ALIBI_BIAS
    attention = settings.section("attn_config")
    if attention is None:
        return
    for key, allowed in _MPT_ATTENTION.items():
        attention.require(key, allowed)
        attention.take(key)
    for key in _MPT_IGNORED:
        attention.take(key)
    limit = attention.number("clip_qkv", default=None)
    if limit is not None:
        keys["attention.clamp_kqv"] = limit
    attention.refuse_rest()


_MPT_ALIBI_BIAS = 8.0
_MPT_ATTENTION: Mapping[str, tuple[object, ...]] = {
    "alibi": (True,),
    "alibi_bias_max": (8, 8.0),
    "attn_type": ("multihead_attention",),
    "attn_uses_sequence_id": (False, None),
    "prefix_lm": (False, None),
    "qk_ln": (False, None),
    "softmax_scale": (None,),
    "is_encoder_decoder": (False, None),
}
# Two of training, and one that every section gets from transformers.
_MPT_IGNORED = ("attn_impl", "attn_pdrop", "chunk_size_feed_forward")
_NEOX = "gpt_neox.layers.{layer}."
_BLOOM = "h.{layer}."
_MPT = "transformer.blocks.{layer}."
_FALCON = "transformer.h.{layer}."

LAYER_NORMED: Mapping[str, TransformersFamily] = {
    "cohere": TransformersFamily(
        architecture="command-r",
        tensors=_ONE_NORM,
        has_half_split_rows=False,
        ties_by_default=True,
        renamed={"layer_norm_eps": "rms_norm_eps"},
        keys={"logit_scale": "logit_scale"},
        defaults={"rope_theta": 500000.0},
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
    "phi": TransformersFamily(
        architecture="phi2",
        tensors={
            **{name: source for name, source in BASE.items() if not name.endswith("ffn_norm")},
            "output_norm": "model.final_layernorm",
            "blk.{layer}.attn_output": "model.layers.{layer}.self_attn.dense",
            "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.fc1",
            "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.fc2",
        },
        activations=_NEW_GELU,
        renamed={"layer_norm_eps": "rms_norm_eps"},
        values={"qk_layernorm": (False, None)},
        rotary_share=0.5,
    ),
    "gpt_neox": TransformersFamily(
        architecture="gptneox",
        tensors={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": ("embed_out", "lm_head"),
            "blk.{layer}.attn_norm": _NEOX + "input_layernorm",
            "blk.{layer}.ffn_norm": _NEOX + "post_attention_layernorm",
            **_fused(_NEOX + "attention.query_key_value"),
            "blk.{layer}.attn_output": _NEOX + "attention.dense",
            "blk.{layer}.ffn_up": _NEOX + "mlp.dense_h_to_4h",
            "blk.{layer}.ffn_down": _NEOX + "mlp.dense_4h_to_h",
        },
        activations=_ANY_GELU,
        renamed={
            "layer_norm_eps": "rms_norm_eps",
            "rotary_pct": "partial_rotary_factor",
            "rotary_emb_base": "rope_theta",
        },
        values={"attention_bias": (True, None), "num_key_value_heads": (None,)},
        ignored=("classifier_dropout", "is_decoder"),
        rotary_share=0.25,
        read_more=_read_gpt_neox,
    ),
    "falcon": TransformersFamily(
        architecture="falcon",
        tensors={
            "token_embd": "transformer.word_embeddings",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
            "blk.{layer}.attn_norm": (_FALCON + "ln_mlp", _FALCON + "input_layernorm"),
            "blk.{layer}.attn_norm_2": _FALCON + "ln_attn",
            **_fused(_FALCON + "self_attention.query_key_value"),
            "blk.{layer}.attn_output": _FALCON + "self_attention.dense",
            "blk.{layer}.ffn_up": _FALCON + "mlp.dense_h_to_4h",
            "blk.{layer}.ffn_down": _FALCON + "mlp.dense_4h_to_h",
        },
        activations=_ANY_GELU,
        ties_by_default=True,
        renamed={
            "layer_norm_epsilon": "rms_norm_eps",
            "num_kv_heads": "num_key_value_heads",
            "activation": "hidden_act",
            "n_embed": "hidden_size",
        },
        absent=("intermediate_size", "max_position_embeddings"),
        values={
            "alibi": (False, None),
            "parallel_attn": (True, None),
            "bias": (False, None),
            "apply_residual_connection_post_layernorm": (False, None),
            "partial_rotary_factor": (1, None),
        },
        read_more=_read_falcon,
    ),
    "bloom": TransformersFamily(
        architecture="bloom",
        tensors={
            "token_embd": "word_embeddings",
            "token_embd_norm": "word_embeddings_layernorm",
            "output_norm": "ln_f",
            "output": "lm_head",
            "blk.{layer}.attn_norm": _BLOOM + "input_layernorm",
            "blk.{layer}.ffn_norm": _BLOOM + "post_attention_layernorm",
            **_fused(_BLOOM + "self_attention.query_key_value"),
            "blk.{layer}.attn_output": _BLOOM + "self_attention.dense",
            "blk.{layer}.ffn_up": _BLOOM + "mlp.dense_h_to_4h",
            "blk.{layer}.ffn_down": _BLOOM + "mlp.dense_4h_to_h",
        },
        activations=_NEW_GELU,
        ties_by_default=True,
        renamed={
            "n_embed": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        absent=("intermediate_size", "max_position_embeddings"),
        values={
            "apply_residual_connection_post_layernorm": (False, None),
            "num_key_value_heads": (None,),
        },
        ignored=(
            *("slow_but_exact", "attention_softmax_in_fp32", "bias_dropout_fusion"),
            *("masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
        ),
        prefixes={"transformer.": ""},
        read_more=_read_bloom,
    ),
    "mpt": TransformersFamily(
        architecture="mpt",
        tensors={
            "token_embd": "transformer.wte",
            "output_norm": "transformer.norm_f",
            "output": "lm_head",
            "blk.{layer}.attn_norm": _MPT + "norm_1",
            "blk.{layer}.ffn_norm": _MPT + "norm_2",
            "blk.{layer}.attn_qkv": _MPT + "attn.Wqkv",
            "blk.{layer}.attn_output": _MPT + "attn.out_proj",
            "blk.{layer}.ffn_up": _MPT + "ffn.up_proj",
            "blk.{layer}.ffn_down": _MPT + "ffn.down_proj",
        },
        activations=_ANY_GELU,
        ties_by_default=True,
        renamed={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        absent=("intermediate_size",),
        defaults={"rms_norm_eps": 1e-5},
        values={
            "expansion_ratio": (4, None),
            "logit_scale": (None,),
            "no_bias": (True, None),
            "norm_type": ("low_precision_layernorm", "layernorm", None),
            "num_key_value_heads": (None,),
        },
        ignored=(
            *("emb_pdrop", "embedding_fraction", "init_config", "init_device"),
            *("learned_pos_emb", "tokenizer_name", "verbose"),
        ),
        read_more=_read_mpt,
    ),
    "olmo": TransformersFamily(
        architecture="olmo",
        tensors={name: source for name, source in {**BASE, **GATED}.items() if "norm" not in name},
        norm_eps=1e-5,
        values={"attention_bias": (False, None), "rms_norm_eps": (1e-5, None)},
        read_more=_read_olmo,
    ),
}

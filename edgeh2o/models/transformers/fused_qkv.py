"""Models of transformers whose queries, keys and values are rows of one matrix.

There they follow each other by KV head, in GGUF all queries come first: see ``families.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import FormatError
from .family import TransformersFamily
from .settings import Settings
from .sources import Source, Sources

# By the error function; GGUF's architectures have both by the hyperbolic tangent.
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def by_kind(n_rows: int, sizes: Mapping[str, int]) -> Sequence[int]:
    """All queries, then keys, then values, of groups of the queries of a KV head, its key, value.

    Raises ValueError for another number of rows.
    """
    head_dim, n_kv_heads = sizes["head_dim"], sizes["kv_dim"] // sizes["head_dim"]
    if n_rows != sizes["qkv_dim"]:
        raise ValueError(f"{n_rows} rows are not {sizes['qkv_dim']} of queries, keys and values")
    if n_kv_heads == 1:
        return ()  # as they are
    n_queries = sizes["q_dim"] // sizes["kv_dim"]  # of a group
    starts = range(0, n_rows, (n_queries + 2) * head_dim)
    end = n_queries * head_dim
    parts = ((0, end), (end, end + head_dim), (end + head_dim, end + 2 * head_dim))
    return [start + row for first, last in parts for start in starts for row in range(first, last)]


def _fused(name: str) -> Mapping[str, Sources]:
    return {
        f"blk.{{layer}}.attn_qkv.{part}": Source(name=f"{name}.{part}", rows=by_kind)
        for part in ("weight", "bias")
    }


def _read_gpt_neox(settings: Settings, keys: dict[str, Any]) -> None:
    keys["use_parallel_residual"] = settings.flag("use_parallel_residual") is not False
    # Some folders say both, which must agree.
    for old, new in _ROTARY_NAMES.items():
        settings.require(old, (settings.take(new), None))


def _read_falcon(settings: Settings, keys: dict[str, Any]) -> None:
    """Numbers with defaults, as folders of the first models lack them, and the KV heads."""
    keys["context_length"] = settings.integer("max_position_embeddings", default=2048)
    width = 4 * keys["embedding_length"]
    keys["feed_forward_length"] = settings.integer("ffn_hidden_size", default=width)
    is_new = settings.flag("new_decoder_architecture") is True
    has_one_kv_head = settings.flag("multi_query") is not False
    n_heads = keys["attention.head_count"]
    n_kv_heads = settings.integer("num_kv_heads", default=n_heads)
    if not is_new:  # num_kv_heads is there, and not used
        n_kv_heads = 1 if has_one_kv_head else n_heads
    if n_heads % n_kv_heads:
        raise FormatError(
            f"{settings.label('num_kv_heads')} is {n_kv_heads}, but must divide the {n_heads} heads"
        )
    keys["attention.head_count_kv"] = n_kv_heads
    # The weights have one norm for both or one each; transformers computes with two in these alone.
    settings.require("num_ln_in_parallel_attn", (1, 2, None) if is_new else (1, None))


_ROTARY_NAMES = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
_NEOX_LAYER = "gpt_neox.layers.{layer}."
_FALCON_LAYER = "transformer.h.{layer}."

FUSED_QKV: Mapping[str, TransformersFamily] = {
    "gpt_neox": TransformersFamily(
        architecture="gptneox",
        tensors={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
            "blk.{layer}.attn_norm": _NEOX_LAYER + "input_layernorm",
            "blk.{layer}.ffn_norm": _NEOX_LAYER + "post_attention_layernorm",
            **_fused(_NEOX_LAYER + "attention.query_key_value"),
            "blk.{layer}.attn_output": _NEOX_LAYER + "attention.dense",
            "blk.{layer}.ffn_up": _NEOX_LAYER + "mlp.dense_h_to_4h",
            "blk.{layer}.ffn_down": _NEOX_LAYER + "mlp.dense_4h_to_h",
        },
        activations=_GELU,
        renamed={"layer_norm_eps": "rms_norm_eps", **_ROTARY_NAMES},
        values={
            "attention_bias": (True, None),
            "is_decoder": (False, True, None),
            # llama.cpp reads no file of it without an output of its own.
            "tie_word_embeddings": (False, None),
        },
        ignored=("classifier_dropout",),
        rotary_share=0.25,
        read_more=_read_gpt_neox,
    ),
    "falcon": TransformersFamily(
        architecture="falcon",
        tensors={
            "token_embd": "transformer.word_embeddings",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
            "blk.{layer}.attn_norm": (
                _FALCON_LAYER + "input_layernorm",
                _FALCON_LAYER + "ln_mlp",
            ),
            "blk.{layer}.attn_norm_2": _FALCON_LAYER + "ln_attn",
            **_fused(_FALCON_LAYER + "self_attention.query_key_value"),
            "blk.{layer}.attn_output": _FALCON_LAYER + "self_attention.dense",
            "blk.{layer}.ffn_up": _FALCON_LAYER + "mlp.dense_h_to_4h",
            "blk.{layer}.ffn_down": _FALCON_LAYER + "mlp.dense_4h_to_h",
        },
        activations=_GELU,
        ties_by_default=True,
        renamed={"layer_norm_epsilon": "rms_norm_eps", "activation": "hidden_act"},
        absent=("max_position_embeddings", "intermediate_size"),
        norm_epsilon=1e-5,
        values={
            "alibi": (False, None),
            "bias": (False, None),
            "parallel_attn": (True, None),
            "apply_residual_connection_post_layernorm": (False, None),
        },
        rotates_whole_heads=True,
        read_more=_read_falcon,
    ),
}

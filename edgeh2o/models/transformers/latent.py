"""Models of transformers with multi-head latent attention: see ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import FormatError
from ...formats.metadata import StoredNumbers
from .family import BASE, EXPERTS, GATED, NO_WINDOWS, UNGATED, TransformersFamily
from .settings import Settings
from .sources import Source, Sources

_PREFIX = "model.layers.{layer}."
_KV_B = _PREFIX + "self_attn.kv_b_proj.weight"


def _keys_of_head(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    """A head's rows of keys, before those of its values."""
    _check(n, sizes)
    return range(sizes["latent_nope_dim"])


def _values_of_head(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    _check(n, sizes)
    return range(sizes["latent_nope_dim"], n)


def _check(n: int, sizes: Mapping[str, int]) -> None:
    expected = sizes["latent_nope_dim"] + sizes["latent_value_dim"]
    if n != expected:
        raise ValueError(f"{n} rows of a head are not the {expected} of the settings")


_LATENT: Mapping[str, Sources] = {
    **{
        name: source
        for name, source in BASE.items()
        if not name.endswith(("attn_q", "attn_k", "attn_v"))
    },
    **GATED,
    "blk.{layer}.attn_q": _PREFIX + "self_attn.q_proj",
    "blk.{layer}.attn_q_a": _PREFIX + "self_attn.q_a_proj",
    "blk.{layer}.attn_q_a_norm": _PREFIX + "self_attn.q_a_layernorm",
    "blk.{layer}.attn_q_b": _PREFIX + "self_attn.q_b_proj",
    "blk.{layer}.attn_kv_a_mqa": _PREFIX + "self_attn.kv_a_proj_with_mqa",
    "blk.{layer}.attn_kv_a_norm": _PREFIX + "self_attn.kv_a_layernorm",
    "blk.{layer}.attn_kv_b": _PREFIX + "self_attn.kv_b_proj",
    "blk.{layer}.attn_k_b.weight": Source(
        name=_KV_B, stacked="n_heads", rows=_keys_of_head, is_transposed=True
    ),
    "blk.{layer}.attn_v_b.weight": Source(name=_KV_B, stacked="n_heads", rows=_values_of_head),
}
_UNGATED_LATENT = {name: _LATENT[name] for name in _LATENT if name not in GATED or name in UNGATED}
_MIXTURE: Mapping[str, Sources] = {
    **EXPERTS,
    "blk.{layer}.exp_probs_b.bias": Source(name=_PREFIX + "mlp.gate.e_score_correction_bias"),
    **{
        f"blk.{{layer}}.ffn_{part}_shexp": f"{_PREFIX}mlp.shared_experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
}
_INDEXER: Mapping[str, Sources] = {
    f"blk.{{layer}}.indexer.{name}": f"{_PREFIX}self_attn.indexer.{source}"
    for name, source in (
        ("attn_q_b", "wq_b"),
        ("attn_k", "wk"),
        ("k_norm", "k_norm"),
        ("proj", "weights_proj"),
    )
}


def _read_latent(settings: Settings, keys: dict[str, Any]) -> tuple[int, int, int, int]:
    """Sizes of the latent row, and of heads: without positions, with them, of values."""
    rank, nope, rope, value = (
        settings.integer(key)
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    keys["attention.kv_lora_rank"] = rank
    if settings.take("q_lora_rank") is not None:
        keys["attention.q_lora_rank"] = settings.integer("q_lora_rank")
    settings.require("qk_head_dim", (nope + rope, None))
    keys["rope.dimension_count"] = rope
    return rank, nope, rope, value


def _read_cached(settings: Settings, keys: dict[str, Any]) -> None:
    """What is cached is one head of rows, whose part with positions may be stretched by YaRN."""
    rank, nope, rope, value = _read_latent(settings, keys)
    keys |= {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": value,
    }
    scaling = settings.section("rope_parameters") or settings.section("rope_scaling")
    kind = scaling.take("rope_type", scaling.take("type", "default")) if scaling else "default"
    if scaling is not None and kind == "yarn":
        both = scaling.number("mscale_all_dim", default=0.0)
        if not both or scaling.number("mscale", default=0.0) != both:
            raise FormatError(
                f"{scaling.label('mscale_all_dim')} must be there and equal to mscale; other "
                "factors of YaRN are not supported"
            )
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * both


def _read_deepseek(settings: Settings, keys: dict[str, Any]) -> None:
    _read_cached(settings, keys)
    keys |= {
        "expert_count": settings.integer("n_routed_experts"),
        "expert_used_count": settings.integer("num_experts_per_tok"),
        "expert_feed_forward_length": settings.integer("moe_intermediate_size"),
        "expert_shared_count": settings.count("n_shared_experts", default=1),
        "leading_dense_block_count": settings.count("first_k_dense_replace", default=0),
        "expert_weights_scale": settings.number("routed_scaling_factor", default=1.0),
        "expert_weights_norm": bool(settings.flag("norm_topk_prob")),
    }


def _read_v2(settings: Settings, keys: dict[str, Any]) -> None:
    _read_deepseek(settings, keys)
    keys["expert_gating_func"] = 1


def _read_v3(settings: Settings, keys: dict[str, Any]) -> None:
    _read_deepseek(settings, keys)
    keys |= {
        "expert_gating_func": 2,
        "expert_group_count": settings.integer("n_group", default=1),
        "expert_group_used_count": settings.integer("topk_group", default=1),
    }


def _read_v32(settings: Settings, keys: dict[str, Any]) -> None:
    _read_v3(settings, keys)
    keys |= {
        "attention.indexer.head_count": settings.integer("index_n_heads"),
        "attention.indexer.key_length": settings.integer("index_head_dim"),
        "attention.indexer.top_k": settings.integer("index_topk"),
    }
    _read_dense_layers(settings, keys)


def _read_dense_layers(settings: Settings, keys: dict[str, Any]) -> None:
    """The first layers, where they are named one by one."""
    kinds = settings.kinds("mlp_layer_types", keys["block_count"], ("dense", "sparse"))
    if kinds is not None:
        n_dense = kinds.count("dense")
        if "dense" in kinds[n_dense:]:
            raise FormatError(
                f"{settings.label('mlp_layer_types')}: dense layers behind mixtures of experts are "
                "not supported"
            )
        keys["leading_dense_block_count"] = n_dense


def _read_glm_lite(settings: Settings, keys: dict[str, Any]) -> None:
    """Keys that are missing have the defaults of transformers."""
    _read_v3(settings, keys)
    keys["expert_weights_norm"] = True
    if settings.take("mlp_layer_types") is None and settings.take("first_k_dense_replace") is None:
        keys["leading_dense_block_count"] = 1
    _read_dense_layers(settings, keys)


def _read_glm_dsa(settings: Settings, keys: dict[str, Any]) -> None:
    """Layers with an indexer are named one by one, or all have one."""
    _read_v32(settings, keys)
    kinds = settings.kinds("indexer_types", keys["block_count"], ("full", "shared"))
    settings.take("index_skip_topk_offset")
    if kinds is None:
        settings.require("index_topk_freq", (1, None))
        settings.require("index_topk_pattern", (None,))
        return
    for key in ("index_topk_freq", "index_topk_pattern"):  # what they were made of
        settings.take(key)
    types = bytes(kind == "full" for kind in kinds)
    keys["attention.indexer.types"] = StoredNumbers(types, "?")


def _read_lengths(settings: Settings, keys: dict[str, Any]) -> None:
    """The sizes of heads as they are computed with, whatever is cached."""
    _, nope, rope, value = _read_latent(settings, keys)
    keys |= {"attention.key_length": nope + rope, "attention.value_length": value}


_SCALES = ("mscale", "mscale_all_dim")
_SIGMOID: Mapping[str, tuple[object, ...]] = {
    "topk_method": ("noaux_tc", None),
    "scoring_func": ("sigmoid", None),
    "rope_interleave": (True, None),
    "moe_layer_freq": (1, None),
}
_UNREAD = ("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers")

# What transformers takes for keys that are missing.
_SCALED: Mapping[str, object] = {
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
_GROUPED: Mapping[str, object] = {**_SCALED, "n_group": 8, "topk_group": 4}

_V3 = TransformersFamily(
    architecture="deepseek2",
    tensors={**_LATENT, **_MIXTURE},
    has_half_split_rows=False,
    defaults=_GROUPED,
    values=_SIGMOID,
    ignored=_UNREAD,
    rope_keys=_SCALES,
    read_more=_read_v3,
    has_drafting_layers=True,
)
_V32 = replace(
    _V3,
    architecture="deepseek32",
    tensors={**_LATENT, **_MIXTURE, **_INDEXER},
    layer_types=("indexed_attention",),
    read_more=_read_v32,
)

LATENT: Mapping[str, TransformersFamily] = {
    "deepseek_v2": TransformersFamily(
        architecture="deepseek2",
        tensors={**_LATENT, **_MIXTURE},
        has_half_split_rows=False,
        values={
            "topk_method": ("greedy", None),
            "scoring_func": ("softmax", None),
            "norm_topk_prob": (False, None),
            "n_group": (1, None),
            "topk_group": (1, None),
            "moe_layer_freq": (1, None),
        },
        ignored=("aux_loss_alpha", "seq_aux", "ep_size"),
        rope_keys=_SCALES,
        read_more=_read_v2,
    ),
    "deepseek_v3": _V3,
    "deepseek_v32": _V32,
    "glm_moe_dsa": replace(_V32, architecture="glm-dsa", defaults=_SCALED, read_more=_read_glm_dsa),
    "glm4_moe_lite": replace(
        _V3,
        defaults={"routed_scaling_factor": 1.8},
        values={**_SIGMOID, "norm_topk_prob": (True, None)},
        read_more=_read_glm_lite,
    ),
    "youtu": TransformersFamily(
        architecture="deepseek2",
        tensors=_LATENT,
        has_half_split_rows=False,
        ties_by_default=True,
        values={"rope_interleave": (True, None)},
        ignored=("embedding_initializer_range",),
        rope_keys=_SCALES,
        read_more=_read_cached,
    ),
    "minicpm3": TransformersFamily(
        architecture="minicpm3",
        tensors=_LATENT,
        ties_by_default=True,
        values={
            "scale_emb": (12, 12.0),
            "scale_depth": (1.4,),
            "dim_model_base": (256,),
            "rope_interleave": (False, None),
        },
        read_more=_read_lengths,
    ),
    "plm": TransformersFamily(
        architecture="plm",
        tensors=_UNGATED_LATENT,
        activations=("relu2",),
        has_half_split_rows=False,
        ties_by_default=True,
        defaults={"rope_theta": 100000.0},
        values={"rope_interleave": (True, None), **NO_WINDOWS},
        read_more=_read_lengths,
    ),
}

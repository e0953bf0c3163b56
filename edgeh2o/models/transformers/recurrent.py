"""Models of transformers whose layers do not all attend: see ``families.py``."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import FormatError
from ...formats.metadata import StoredNumbers
from .family import (
    BASE,
    GATED,
    QK_NORMS,
    SHARED_EXPERT,
    SPARSE_EVERYWHERE,
    TEXT_PREFIXES,
    WIDE_EXPERT_KEYS,
    TransformersFamily,
)
from .settings import Settings
from .sources import Source, Sources, first_half, second_half

_PREFIX = "model.layers.{layer}."
_LFM2: Mapping[str, Sources] = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "blk.{layer}.attn_norm": _PREFIX + "operator_norm",
    "blk.{layer}.ffn_norm": _PREFIX + "ffn_norm",
    "blk.{layer}.attn_q": _PREFIX + "self_attn.q_proj",
    "blk.{layer}.attn_k": _PREFIX + "self_attn.k_proj",
    "blk.{layer}.attn_v": _PREFIX + "self_attn.v_proj",
    "blk.{layer}.attn_output": _PREFIX + "self_attn.out_proj",
    "blk.{layer}.attn_q_norm": _PREFIX + "self_attn.q_layernorm",
    "blk.{layer}.attn_k_norm": _PREFIX + "self_attn.k_layernorm",
    "blk.{layer}.shortconv.in_proj": _PREFIX + "conv.in_proj",
    "blk.{layer}.shortconv.conv": _PREFIX + "conv.conv",
    "blk.{layer}.shortconv.out_proj": _PREFIX + "conv.out_proj",
    "blk.{layer}.ffn_gate": _PREFIX + "feed_forward.w1",
    "blk.{layer}.ffn_up": _PREFIX + "feed_forward.w3",
    "blk.{layer}.ffn_down": _PREFIX + "feed_forward.w2",
}
_LFM2_EXPERTS: Mapping[str, Sources] = {
    "blk.{layer}.ffn_gate_inp": _PREFIX + "feed_forward.gate",
    "blk.{layer}.exp_probs_b.bias": Source(name=_PREFIX + "feed_forward.expert_bias"),
    "blk.{layer}.ffn_gate_exps": _PREFIX + "feed_forward.experts.{expert}.w1",
    "blk.{layer}.ffn_up_exps": _PREFIX + "feed_forward.experts.{expert}.w3",
    "blk.{layer}.ffn_down_exps": _PREFIX + "feed_forward.experts.{expert}.w2",
}
_LFM2_THETA = 1e6


def _read_lfm2(settings: Settings, keys: dict[str, Any]) -> None:
    _read_convolutions(settings, keys)
    factor = settings.number("block_ffn_dim_multiplier", default=1.0)
    multiple = settings.integer("block_multiple_of", default=256)
    if settings.flag("block_auto_adjust_ff_dim") is not False:
        width = int(factor * (2 * keys["feed_forward_length"] // 3))
        keys["feed_forward_length"] = -(-width // multiple) * multiple


def _read_lfm2_moe(settings: Settings, keys: dict[str, Any]) -> None:
    _read_convolutions(settings, keys)
    keys["leading_dense_block_count"] = settings.count("num_dense_layers", default=2)
    keys["expert_gating_func"] = 2  # a sigmoid


def _read_convolutions(settings: Settings, keys: dict[str, Any]) -> None:
    keys["shortconv.l_cache"] = settings.integer("conv_L_cache", default=3)
    keys.setdefault("rope.freq_base", _LFM2_THETA)
    n_layers = keys["block_count"]
    kinds = settings.take("layer_types")
    indices = settings.take("full_attn_idxs")
    if kinds is None and isinstance(indices, list):
        kinds = ["full_attention" if layer in indices else "conv" for layer in range(n_layers)]
    if kinds is None:
        raise FormatError(f"{settings.label('layer_types')} is missing")
    set_attending(keys, [kind != "conv" for kind in kinds])


def set_attending(keys: dict[str, Any], attends: Sequence[bool]) -> None:
    """Layers that do not attend have no KV heads."""
    n_kv_heads = keys["attention.head_count_kv"]
    counts = [n_kv_heads if each else 0 for each in attends]
    keys["attention.head_count_kv"] = integers(counts)


def integers(numbers: Sequence[int]) -> StoredNumbers:
    """Numbers of layers as a file holds them. Raises FormatError for those of more than 32 bits."""
    try:
        return StoredNumbers(struct.pack(f"<{len(numbers)}i", *numbers), "<i4")
    except struct.error:
        raise FormatError("config.json has a size of more than 32 bits, as no model has") from None


# Delta nets: heads of values that share a head of keys are neighbours here, but lie in turns in
# the GGUF files of Qwen3.5.
def _in_turns(sizes: Mapping[str, int], width: int, first: int = 0) -> list[int]:
    """Rows of value heads, ``width`` each, in GGUF's order."""
    n_keys, n_values = sizes["n_delta_key_heads"], sizes["n_delta_heads"]
    group = n_values // n_keys
    return [
        first + (key * group + member) * width + row
        for member in range(group)
        for key in range(n_keys)
        for row in range(width)
    ]


def _values_in_turns(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    _expect(n, sizes["delta_value_dim"])
    return _in_turns(sizes, sizes["delta_head_dim"])


def _heads_in_turns(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    _expect(n, sizes["n_delta_heads"])
    return _in_turns(sizes, 1)


def _last_in_turns(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    """Behind queries and keys."""
    _expect(n, sizes["delta_conv_dim"])
    first = n - sizes["delta_value_dim"]
    return [*range(first), *_in_turns(sizes, sizes["delta_head_dim"], first)]


def _queries_keys_values(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    """Of rows that have query, key, values and gates of a head of keys together."""
    query, key, values, _ = _groups(n, sizes)
    return [*query, *key, *values]


def _gates(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    return _groups(n, sizes)[3]


def _groups(n: int, sizes: Mapping[str, int]) -> tuple[list[int], ...]:
    _expect(n, sizes["delta_conv_dim"] + sizes["delta_value_dim"])
    n_groups = sizes["n_delta_key_heads"]
    head, values = sizes["delta_head_dim"], sizes["delta_value_dim"] // n_groups
    parts, start = [], 0
    for width in (head, head, values, values):
        firsts = (group * (n // n_groups) + start for group in range(n_groups))
        parts.append([first + row for first in firsts for row in range(width)])
        start += width
    return tuple(parts)


def _expect(n: int, expected: int) -> None:
    if n != expected:
        raise ValueError(f"{n} are not the {expected} of the settings")


_NEXT_BASE: Mapping[str, Sources] = {
    **{name: source for name, source in BASE.items() if not name.endswith("ffn_norm")},
    **QK_NORMS,
    "blk.{layer}.post_attention_norm": _PREFIX + "post_attention_layernorm",
    "blk.{layer}.ssm_norm.weight": Source(name=_PREFIX + "linear_attn.norm.weight"),
}
_NEXT: Mapping[str, Sources] = {
    **_NEXT_BASE,
    "blk.{layer}.attn_qkv.weight": Source(
        name=_PREFIX + "linear_attn.in_proj_qkvz.weight", rows=_queries_keys_values
    ),
    "blk.{layer}.attn_gate.weight": Source(
        name=_PREFIX + "linear_attn.in_proj_qkvz.weight", rows=_gates
    ),
    "blk.{layer}.ssm_ba": _PREFIX + "linear_attn.in_proj_ba",
    "blk.{layer}.ssm_conv1d": _PREFIX + "linear_attn.conv1d",
    "blk.{layer}.ssm_dt.bias": Source(name=_PREFIX + "linear_attn.dt_bias"),
    "blk.{layer}.ssm_a": Source(name=_PREFIX + "linear_attn.A_log", change="minus_exp"),
    "blk.{layer}.ssm_out": _PREFIX + "linear_attn.out_proj",
}
_QWEN35: Mapping[str, Sources] = {
    **_NEXT_BASE,
    "blk.{layer}.attn_qkv.weight": Source(
        name=_PREFIX + "linear_attn.in_proj_qkv.weight", rows=_last_in_turns
    ),
    "blk.{layer}.attn_gate.weight": Source(
        name=_PREFIX + "linear_attn.in_proj_z.weight", rows=_values_in_turns
    ),
    "blk.{layer}.ssm_beta.weight": Source(
        name=_PREFIX + "linear_attn.in_proj_b.weight", rows=_heads_in_turns
    ),
    "blk.{layer}.ssm_alpha.weight": Source(
        name=_PREFIX + "linear_attn.in_proj_a.weight", rows=_heads_in_turns
    ),
    "blk.{layer}.ssm_conv1d.weight": Source(
        name=_PREFIX + "linear_attn.conv1d.weight", rows=_last_in_turns
    ),
    "blk.{layer}.ssm_dt.bias": Source(name=_PREFIX + "linear_attn.dt_bias", rows=_heads_in_turns),
    "blk.{layer}.ssm_a": Source(
        name=_PREFIX + "linear_attn.A_log", rows=_heads_in_turns, change="minus_exp"
    ),
    "blk.{layer}.ssm_out.weight": Source(
        name=_PREFIX + "linear_attn.out_proj.weight", columns=_values_in_turns
    ),
}


def expert_matrices(template: str) -> Mapping[str, Sources]:
    """One per expert, or all of a layer in one tensor, with gates above the others."""
    joined = template.removesuffix(".{expert}")
    return {
        "blk.{layer}.ffn_gate_exps.weight": (
            Source(name=template + ".gate_proj.weight"),
            Source(name=joined + ".gate_up_proj", rows=first_half),
        ),
        "blk.{layer}.ffn_up_exps.weight": (
            Source(name=template + ".up_proj.weight"),
            Source(name=joined + ".gate_up_proj", rows=second_half),
        ),
        "blk.{layer}.ffn_down_exps.weight": (
            Source(name=template + ".down_proj.weight"),
            Source(name=joined + ".down_proj"),
        ),
    }


_NEXT_EXPERTS: Mapping[str, Sources] = {
    **SHARED_EXPERT,
    "blk.{layer}.ffn_gate_inp": _PREFIX + "mlp.gate",
    **expert_matrices(_PREFIX + "mlp.experts.{expert}"),
}


def _read_delta_nets(settings: Settings, keys: dict[str, Any]) -> None:
    n_values = settings.integer("linear_num_value_heads", default=32)
    keys |= {
        "ssm.conv_kernel": settings.integer("linear_conv_kernel_dim", default=4),
        "ssm.state_size": settings.integer("linear_key_head_dim", default=128),
        "ssm.group_count": settings.integer("linear_num_key_heads", default=16),
        "ssm.time_step_rank": n_values,
        "ssm.inner_size": n_values * settings.integer("linear_value_head_dim", default=128),
    }
    n_layers = keys["block_count"]
    interval = settings.integer("full_attention_interval", default=4)
    kinds = settings.take("layer_types")
    if kinds is not None:
        attends = [kind == "full_attention" for kind in kinds]
        interval = attends.index(True) + 1 if True in attends else n_layers + 1
        if attends != [(layer + 1) % interval == 0 for layer in range(n_layers)]:
            raise FormatError(
                f"{settings.label('layer_types')}: layers with attention are not every so many "
                "ones, which is not supported"
            )
    keys["full_attention_interval"] = interval


def _read_qwen35(settings: Settings, keys: dict[str, Any]) -> None:
    _read_delta_nets(settings, keys)
    rope = settings.section("rope_parameters") or settings.section("rope_scaling")
    sections = rope.take("mrope_section") if rope else None
    # A text has the same position on all axes, whose pairs must be there in a GGUF file.
    keys["rope.dimension_sections"] = integers([11, 11, 10, 0])
    if sections is not None:
        if not (
            isinstance(sections, list)
            and 3 <= len(sections) <= 4
            and all(type(size) is int and 0 <= size < 2**16 for size in sections)
        ):
            raise FormatError(f"{settings.label('mrope_section')} must be a list of three numbers")
        keys["rope.dimension_sections"] = integers([*sections, 0][:4])


_SECTIONS = ("mrope_section", "mrope_interleaved")
_MTP = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
_LEFT_OUT = ("model.visual.", "visual.", "mtp.", "model.mtp.")

RECURRENT: Mapping[str, TransformersFamily] = {
    "lfm2": TransformersFamily(
        architecture="lfm2",
        tensors=_LFM2,
        ties_by_default=True,
        renamed={
            "norm_eps": "rms_norm_eps",
            "block_ff_dim": "intermediate_size",
            "tie_embedding": "tie_word_embeddings",
        },
        ignored=(
            *("block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale"),
            *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"),
            *("num_heads", "theta"),
        ),
        values={
            "conv_bias": (False, None),
            "block_use_swiglu": (True, None),
            "use_pos_enc": (True, None),
            "sliding_window": (None,),
        },
        layer_types=("conv",),
        read_more=_read_lfm2,
    ),
    "lfm2_moe": TransformersFamily(
        architecture="lfm2moe",
        tensors={**_LFM2, **_LFM2_EXPERTS},
        ties_by_default=True,
        renamed={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
        keys=WIDE_EXPERT_KEYS,
        values={
            "conv_bias": (False, None),
            "use_expert_bias": (True,),
            "norm_topk_prob": (True,),
            "routed_scaling_factor": (1.0, 1, None),
            "use_pos_enc": (True, None),
        },
        layer_types=("conv",),
        read_more=_read_lfm2_moe,
    ),
    "qwen3_next": TransformersFamily(
        architecture="qwen3next",
        tensors={**_NEXT, **_NEXT_EXPERTS},
        adds_one=True,
        keys={
            **WIDE_EXPERT_KEYS,
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        values={"norm_topk_prob": (True, None), **SPARSE_EVERYWHERE},
        rotary_share=0.25,
        layer_types=("linear_attention",),
        read_more=_read_delta_nets,
        left_out=_LEFT_OUT,
    ),
    "qwen3_5_text": TransformersFamily(
        architecture="qwen35",
        tensors={**_QWEN35, **GATED},
        adds_one=True,
        values={"attn_output_gate": (True, None), "mlp_only_layers": ([], None)},
        ignored=_MTP,
        rope_keys=_SECTIONS,
        rotary_share=0.25,
        layer_types=("linear_attention",),
        read_more=_read_qwen35,
        prefixes=TEXT_PREFIXES,
        left_out=_LEFT_OUT,
    ),
    "qwen3_5_moe_text": TransformersFamily(
        architecture="qwen35moe",
        tensors={**_QWEN35, **_NEXT_EXPERTS},
        adds_one=True,
        keys={
            **WIDE_EXPERT_KEYS,
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        values={"attn_output_gate": (True, None), "mlp_only_layers": ([], None)},
        absent=("intermediate_size",),
        ignored=(*_MTP, "intermediate_size"),
        rope_keys=_SECTIONS,
        rotary_share=0.25,
        layer_types=("linear_attention",),
        read_more=_read_qwen35,
        prefixes=TEXT_PREFIXES,
        left_out=_LEFT_OUT,
    ),
}

"""Finds the attention nodes of an ONNX decoder and says what each of them computes.

Known are the operators GroupQueryAttention and MultiHeadAttention of onnxruntime (domain
com.microsoft) and Attention of ONNX (opset 23). A node with an input or attribute whose effect is
not reproduced here is refused by name: nothing is computed approximately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import FormatError
from ..formats.metadata import quote
from .graph import OnnxGraph, attributes, describe_node, input_names
from .messages import Node

MICROSOFT = "com.microsoft"
# Graphs may compute a mask of all positions against all to take a row of it: 1 GiB in float32.
MAX_MASK_CONTEXT = 16384
# Other operators that compute attention: found, they are named instead of being run in pieces.
_UNSUPPORTED = (
    "PagedAttention",
    "SparseAttention",
    "DecoderMaskedMultiHeadAttention",
    "DecoderMaskedSelfAttention",
    "DecoderAttention",
    "MultiScaleDeformableAttention",
    "PackedAttention",
    "PackedMultiHeadAttention",
    "QAttention",
    "QOrderedAttention",
    "LongformerAttention",
    "GatedRelativePositionBias",
)
_OWN_NORMS = "norms of its own, as exports for GPUs have,"
CONVOLUTION = "CausalConvWithState"  # of LFM2: see convolutions.py
# Other operators with a state beside the cache, as between the attention of Qwen3.5.
_RECURRENT = ("LinearAttention", "GatedDeltaNet", "VarlenCausalConvWithState")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """A rotary embedding that the node applies: names of the tables [positions, pairs]."""

    cos: str
    sin: str
    is_interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """One attention node, or what stands for one.

    ``q``, ``k``, ``v`` and ``output`` name values [1, n, heads * head_dim], or [1, heads, n,
    head_dim] of those that ``head_major`` lists as letters of "qkvo". An empty ``k`` and ``v`` mean
    that ``q`` holds all three, one after the other in every row. ``sinks`` name logits [heads] that
    take a part of every softmax. Sizes are None where the node does not give them. Of one that
    ``is_composed`` of several nodes ``node`` is the last, and ``gives_half`` says whether its
    output is float16; of others that is the type of the cache.
    """

    node: Node
    q: str
    k: str
    v: str
    n_heads: int | None
    n_kv_heads: int | None
    scale: float | None
    head_major: str = ""
    soft_cap: float = 0.0
    window: int = 0
    rotary: Rotary | None = None
    sinks: str = ""
    past_key: str = ""
    past_value: str = ""
    is_composed: bool = False
    gives_half: bool | None = None
    # Values that must be what a causal decoder makes them, and what that is.
    masks: tuple[tuple[str, str], ...] = ()

    @property
    def output(self) -> str:
        """The value that the attention computes."""
        return str(self.node.output[0])

    @property
    def sources(self) -> dict[str, str]:
        """The values that it reads, by what they are."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        return {what: name for what, name in named.items() if name}

    @property
    def max_context(self) -> int | None:
        """Positions up to which a mask of [tokens, total] is tried out; None without one."""
        has_mask = self.is_composed or any(kind.endswith("bias") for _, kind in self.masks)
        return MAX_MASK_CONTEXT if has_mask else None


def is_past(name: str) -> bool:
    """Whether an input of that name is a cache."""
    return name.startswith(("past_key_values", "past_key", "past_value", "past."))


def find_attention(
    graph: OnnxGraph, composed: Mapping[int, AttentionSite] = MappingProxyType({})
) -> list[AttentionSite]:
    """The attention of a decoder, in graph order; ``composed`` by the id of its last node.

    Raises FormatError that names the node and the operator for one that cannot be replaced.
    """
    sites = []
    for node in graph.nodes:
        if id(node) in composed:
            sites.append(composed[id(node)])
            continue
        if node.op_type in _RECURRENT:
            raise FormatError(
                f"{describe_node(node)}: this operator keeps a state of its own beside the cache, "
                "which is not supported in ONNX models; run a GGUF file of the model"
            )
        if node.op_type in _UNSUPPORTED:
            raise FormatError(
                f"{describe_node(node)}: this operator is not supported; export the model with "
                "GroupQueryAttention, MultiHeadAttention or Attention"
            )
        read = _READERS.get((_domain(node), node.op_type))
        if read is not None:
            if not node.output[0]:
                raise FormatError(
                    f"the output of {describe_node(node)} is left out; export the model again"
                )
            sites.append(read(node))
        elif node.op_type == "Attention":
            raise FormatError(
                f"{describe_node(node)}: this fused operator (with the projections inside) is not "
                "supported; export with GroupQueryAttention or MultiHeadAttention"
            )
    return sites


def _domain(node: Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _read_group_query_attention(node: Node) -> AttentionSite:
    values = known_attributes(
        node,
        "num_heads kv_num_heads scale softcap do_rotary rotary_interleaved local_window_size "
        "qk_norm_epsilon",
        {
            "smooth_softmax": (0, -1),
            "causal": (1,),
            "qk_output": (0,),
            "k_quant_type": ("NONE",),
            "v_quant_type": ("NONE",),
            "kv_cache_bit_width": (0, 8, 16, 32),
            # Of its windows: a cache that holds no more than they read.
            "sliding_window_cache": (0, 1),
        },
    )
    names = known_inputs(node, 16, {
        10: "an attention bias", 12: "a quantised cache",
        13: "a quantised cache", 14: _OWN_NORMS, 15: _OWN_NORMS,
    })  # fmt: skip
    q, k, v, past_key = names[:4]
    if bool(k) != bool(v):
        raise FormatError(f"{describe_node(node)} has a key or a value, but not both")
    rotary = None
    if values.get("do_rotary", 0):
        rotary = Rotary(
            cos=names[7], sin=names[8], is_interleaved=bool(values.get("rotary_interleaved", 0))
        )
        if not (rotary.cos and rotary.sin):
            raise FormatError(f"{describe_node(node)} rotates without tables of cos and sin")
    window = int(values.get("local_window_size", -1))
    if values.get("sliding_window_cache", 0) and window <= 0:
        raise FormatError(f"{describe_node(node)} has a cache of a window, but no window")
    masks = [(names[5], "last position"), (names[6], "total length")]
    if names[9]:
        masks.append((names[9], "positions"))
    return AttentionSite(
        node=node,
        q=q,
        k=k,
        v=v,
        n_heads=_count(node, values, "num_heads"),
        n_kv_heads=_count(node, values, "kv_num_heads"),
        scale=_scale(node, values),
        soft_cap=_soft_cap(node, values),
        window=max(0, window),
        rotary=rotary,
        sinks=names[11],
        past_key=past_key,
        masks=tuple(mask for mask in masks if mask[0]),
    )


def _read_multi_head_attention(node: Node) -> AttentionSite:
    values = known_attributes(node, "num_heads scale unidirectional mask_filter_value")
    refused = {3: "biases of its own", 8: "a shared cache", 9: "beam search"}
    names = known_inputs(node, 10, refused)
    q, k, v, _, padding, bias, past_key, _ = names[:8]
    if not (k and v):
        raise FormatError(
            f"{describe_node(node)} has queries, keys and values in one tensor; export the model "
            "with separate ones"
        )
    masks = [(padding, "no padding")] if padding else []
    if bias:
        masks.append((bias, "bias" if values.get("unidirectional", 0) else "causal bias"))
    elif not values.get("unidirectional", 0):
        raise FormatError(
            f"{describe_node(node)} is not causal (no attention bias, unidirectional is not set): "
            "this is no decoder of text"
        )
    n_heads = _count(node, values, "num_heads")
    return AttentionSite(
        node=node,
        q=q,
        k=k,
        v=v,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        scale=_scale(node, values),
        past_key=past_key,
        masks=tuple(masks),
    )


def _read_attention(node: Node) -> AttentionSite:
    values = known_attributes(
        node,
        "is_causal q_num_heads kv_num_heads scale softcap qk_matmul_output_mode softmax_precision",
    )
    names = known_inputs(node, 7, {6: "a padded cache"})
    if len(node.output) > 3 and node.output[3]:
        raise FormatError(f"{describe_node(node)} gives out its logits, which is not supported")
    kind = "bias" if values.get("is_causal", 0) else "causal bias"
    masks = [(names[3], kind)] if names[3] else []
    if not masks and not values.get("is_causal", 0):
        raise FormatError(
            f"{describe_node(node)} is not causal (no mask, is_causal is not set): this is no "
            "decoder of text"
        )
    has_heads = "q_num_heads" not in values
    return AttentionSite(
        node=node,
        q=names[0],
        k=names[1],
        v=names[2],
        head_major="qkvo" if has_heads else "",
        n_heads=None if has_heads else _count(node, values, "q_num_heads"),
        n_kv_heads=None if has_heads else _count(node, values, "kv_num_heads"),
        scale=_scale(node, values),
        soft_cap=_soft_cap(node, values),
        past_key=names[4],
        masks=tuple(masks),
    )


_READERS: Mapping[tuple[str, str], Callable[[Node], AttentionSite]] = {
    (MICROSOFT, "GroupQueryAttention"): _read_group_query_attention,
    (MICROSOFT, "MultiHeadAttention"): _read_multi_head_attention,
    ("", "Attention"): _read_attention,
}


def known_attributes(
    node: Node,
    allowed: str,
    neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The attributes: ``allowed`` ones, and others with a value that is ``neutral``."""
    values = attributes(node)
    for name, value in values.items():
        if name in allowed.split() or value in neutral.get(name, ()):
            continue
        raise FormatError(
            f"{describe_node(node)} has the attribute {quote(name)} = {value!r:.40}, which is not "
            "supported; export the model without it"
        )
    return values


def known_inputs(node: Node, count: int, refused: Mapping[int, str]) -> list[str]:
    """The first ``count`` inputs, "" for those left out, as the ``refused`` ones must be."""
    names = input_names(node, count)
    for i, what in refused.items():
        if names[i]:
            raise FormatError(
                f"{describe_node(node)} has {what} (input {i}, {quote(names[i])}), which is not "
                "supported; export the model without it"
            )
    return names


def _count(node: Node, values: Mapping[str, Any], name: str) -> int:
    count = values.get(name)
    if not isinstance(count, int) or not 1 <= count <= 2**16:
        raise FormatError(f"{describe_node(node)} has {name} = {count!r}, which cannot be")
    return count


def _scale(node: Node, values: Mapping[str, Any]) -> float | None:
    """None: one over the square root of the head's width. GroupQueryAttention takes 0 for that."""
    scale = values.get("scale")
    if scale is None or scale == 0.0:
        return None
    if not math.isfinite(scale) or scale < 0.0:
        raise FormatError(f"{describe_node(node)} has scale = {scale!r}, which cannot be")
    return float(scale)


def _soft_cap(node: Node, values: Mapping[str, Any]) -> float:
    cap = values.get("softcap", 0.0)
    if not math.isfinite(cap) or cap < 0.0:
        raise FormatError(f"{describe_node(node)} has softcap = {cap!r}, which cannot be")
    return float(cap)

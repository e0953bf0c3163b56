"""Attention that a graph makes of several nodes: where it begins and ends.

Exporters of PyTorch join the cache with the new keys and values by a Concat of their own, repeat
the KV heads for their query heads, and multiply in MatMul and Softmax or in an operator without a
cache. Found are the values between which all that lies; that it is attention is for ``trial``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .graph import OnnxGraph, attributes
from .messages import Node
from .sites import AttentionSite, is_past

# What moves the rows of a cache about, repeats heads, or scales them.
_MOVES = frozenset(
    [
        "Cast",
        "Div",
        "Expand",
        "Identity",
        "Mul",
        "Reshape",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    ]
)
_MAX_MOVES = 16
# Between the logits and the weights of a softmax; what a mask is made of leads to no product.
_PRODUCTS = frozenset(
    ["FusedMatMul", "Gemm", "MatMul", "MatMulInteger", "MatMulNBits", "QLinearMatMul"]
)
# Its scale leads past the product that it is for, to the layers before.
_ROUNDING = "DynamicQuantizeLinear"
_MAX_WALK = 4096
# Operators that attend to what they are given, and which of their inputs are keys and values.
_FUSED = {("", "Attention"): (1, 2), ("com.microsoft", "MultiHeadAttention"): (1, 2)}


@dataclass(frozen=True, slots=True)
class _Cache:
    """A ``past`` that is joined with ``new`` rows, and the node that multiplies both together."""

    past: str
    new: str
    end: Node
    place: int


def find_composed(graph: OnnxGraph) -> dict[int, AttentionSite]:
    """Attention between caches that a graph joins itself, by the id of its last node.

    Their scale, soft cap and window are not known yet.
    """
    caches = [cache for name in graph.inputs if is_past(name) for cache in _find_cache(graph, name)]
    by_end = {(id(cache.end), cache.place): cache for cache in caches}
    sites = {}
    for values in caches:
        kind = ("" if values.end.domain == "ai.onnx" else values.end.domain, values.end.op_type)
        if kind in _FUSED:
            keys = by_end.get((id(values.end), _FUSED[kind][0]))
            if values.place != _FUSED[kind][1] or keys is None:
                continue
            has_heads = kind[1] == "Attention" and "q_num_heads" not in attributes(values.end)
            site = _make_site(keys, values, "qkvo" if has_heads else "kv")
        else:
            keys = _find_keys(graph, values, by_end)
            if keys is None:
                continue
            site = _make_site(keys, values, "qkvo")
        sites[id(values.end)] = site
    return sites


def _make_site(keys: _Cache, values: _Cache, head_major: str) -> AttentionSite:
    return AttentionSite(
        node=values.end,
        q=keys.end.input[0],
        k=keys.new,
        v=values.new,
        n_heads=None,
        n_kv_heads=None,
        scale=None,
        head_major=head_major,
        past_key=keys.past,
        past_value=values.past,
        is_composed=True,
    )


def _find_cache(graph: OnnxGraph, past: str) -> list[_Cache]:
    """The cache of a past that one Concat reads, and else only Shape; empty if there is none."""
    readers = [node for node in graph.consumers(past) if node.op_type != "Shape"]
    if len(readers) != 1 or readers[0].op_type != "Concat" or len(readers[0].input) != 2:
        return []
    joined = readers[0]
    if joined.input[0] != past or attributes(joined).get("axis") not in (2, -2):
        return []
    value = joined.output[0]
    for _ in range(_MAX_MOVES):
        readers = [node for node in graph.consumers(value) if node.op_type != "Shape"]
        if len(readers) != 1:
            return []
        node = readers[0]
        if node.op_type not in _MOVES:
            return [_Cache(past, joined.input[1], node, list(node.input).index(value))]
        value = node.output[0]
    return []


def _find_keys(
    graph: OnnxGraph, values: _Cache, by_end: Mapping[tuple[int, int], _Cache]
) -> _Cache | None:
    """The keys whose products with queries weigh ``values``."""
    if values.end.op_type != "MatMul" or values.place != 1:
        return None
    waiting, seen = [values.end.input[0]], 0
    known = set(waiting)
    while waiting and seen < _MAX_WALK:
        node = graph.producers.get(waiting.pop())
        seen += 1
        if node is None:
            continue
        if node.op_type == _ROUNDING:
            continue
        if node.op_type in _PRODUCTS:
            found = by_end.get((id(node), 1))
            if found is not None and node.op_type in ("FusedMatMul", "MatMul"):
                return found
            continue
        for name in node.input:
            if name and name not in known:
                known.add(name)
                waiting.append(name)
    return None

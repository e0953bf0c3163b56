"""Checks of operands that onnxruntime itself does not make in every version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import FormatError
from ..formats.metadata import quote
from .graph import OnnxGraph, attributes, describe_node
from .messages import Node

if TYPE_CHECKING:
    from .sites import AttentionSite

_UINT8, _BFLOAT16, _UINT4, _INT4 = 2, 16, 21, 22
_MAX_SIZE = 2**31


def check_blocks(graph: OnnxGraph) -> None:
    """Sizes of all MatMulNBits, which onnxruntime 1.23 does not compare with K and N.

    Raises FormatError that names the node.
    """
    for node in graph.nodes:
        if node.op_type == "MatMulNBits":
            _check_node(graph, node)


def check_embeddings(graph: OnnxGraph) -> None:
    """Raises FormatError for a quantised embedding that shares a matrix of another form.

    The model builder of onnxruntime-genai names one that it does not write, where the output
    matrix has zero points.
    """
    for node in graph.nodes:
        if node.op_type != "GatherBlockQuantized":
            continue
        name = node.input[0]
        maker = graph.producers.get(name)
        if maker is not None and maker.op_type == "Reshape":
            name = maker.input[0]
        tensor = graph.constant(name)
        is_quantised = tensor is None or tensor.elem_type in (_UINT8, _UINT4, _INT4)
        if not is_quantised or len(node.input) < 3 or not node.input[2]:
            raise FormatError(
                f"{describe_node(node)} shares the embedding with the output matrix, but the "
                "file does not hold it quantised, as that operator needs it (the model builder's "
                "int4 with zero points); export it again with shared_embeddings=false, or with "
                "symmetric blocks (is_symmetric=true)"
            )


def check_caches(graph: OnnxGraph, sites: Sequence[AttentionSite]) -> None:
    """Raises FormatError for a cache of bfloat16, which onnxruntime does not compute on CPUs."""
    for site in sites:
        past = graph.inputs.get(site.past_key)
        if past is not None and past.elem_type == _BFLOAT16:
            raise FormatError(
                f"the cache {quote(site.past_key)} is bfloat16, which onnxruntime does not compute "
                "on CPUs; export the model in float32, float16 or int4"
            )


def _check_node(graph: OnnxGraph, node: Node) -> None:
    values = attributes(node)
    n_inputs, n_outputs = _size(node, values, "K"), _size(node, values, "N")
    block_size, bits = _size(node, values, "block_size"), values.get("bits", 4)
    if bits not in (2, 4, 8) or block_size < 16 or block_size & (block_size - 1):
        raise FormatError(
            f"{describe_node(node)} has blocks of {block_size} values of {bits} bits; such blocks "
            "do not exist"
        )
    if bits == 8 and len(node.input) > 4 and node.input[4]:
        raise FormatError(
            f"{describe_node(node)} has group indices (g_idx) for weights of 8 bits, which "
            "onnxruntime does not compute; export the model with 4 bits or without desc_act"
        )
    n_blocks = -(-n_inputs // block_size)
    expected: dict[int, tuple[str, int]] = {
        1: ("weights", n_outputs * n_blocks * (block_size * bits // 8)),
        2: ("scales", n_outputs * n_blocks),
        3: ("zero points", n_outputs * n_blocks),
        4: ("group indices", n_inputs),
        5: ("bias", n_outputs),
    }
    for i, (what, count) in expected.items():
        name = node.input[i] if i < len(node.input) else ""
        if not name:
            continue
        tensor = graph.constant(name)
        if tensor is None:
            raise FormatError(f"the {what} of {describe_node(node)} are no constants of the model")
        if i == 3 and tensor.elem_type == _UINT8:
            count = n_outputs * (-(-n_blocks * bits // 8))
        found = 1
        for dim in tensor.shape:
            found *= dim
        is_shaped = i != 1 or len(tensor.shape) != 3 or tensor.shape[:2] == (n_outputs, n_blocks)
        if found < count or (i < 3 and found != count) or not is_shaped:
            raise FormatError(
                f"the {what} of {describe_node(node)} have shape {list(tensor.shape)}; "
                f"K = {n_inputs} and N = {n_outputs} need {count} numbers"
            )


def _size(node: Node, values: dict[str, Any], name: str) -> int:
    size = values.get(name)
    if not isinstance(size, int) or not 1 <= size < _MAX_SIZE:
        raise FormatError(f"{describe_node(node)} has {name} = {size!r}, which cannot be")
    return size

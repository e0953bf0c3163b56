"""The matrix products of an ONNX decoder that the kernels of edgeh2o compute.

These are the MatMulNBits that ask for 8-bit activations (accuracy_level 4), of float32 values, in
blocks that GGUF has too. The others stay with onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _core
from .blocks import INT8_ACTIVATIONS, unpack_blocks
from .graph import OnnxGraph, attributes, input_names
from .messages import Node

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOAT, _UINT8 = 1, 2


@dataclass(frozen=True, slots=True)
class Product:
    """``output`` [.., n_out] = ``input`` [.., n_in] times a weight."""

    input: str
    output: str
    linear: _core.Linear


@dataclass(frozen=True, slots=True)
class ProductGroup:
    """Products of one input, which is rounded to 8 bits once."""

    input: str
    outputs: Sequence[str]
    linears: Sequence[_core.Linear]

    @property
    def depth(self) -> int:
        return self.linears[0].cols


def pack_products(graph: OnnxGraph, on_bytes: Callable[[int], None]) -> list[Product]:
    """The products of a graph that ``check_blocks`` has passed, their weights packed.

    ``on_bytes`` is given the bytes of each tensor that was packed.
    """
    products = []
    for node in graph.nodes:
        if node.op_type != "MatMulNBits":
            continue
        linear = _pack(graph, node)
        if linear is not None:
            products.append(Product(node.input[0], node.output[0], linear))
            tensors = [tensor for name in node.input if (tensor := graph.constant(name))]
            for tensor in tensors:
                tensor.release()
            on_bytes(sum(len(tensor.data) for tensor in tensors))
    return products


def group_products(products: Sequence[Product]) -> list[ProductGroup]:
    """Products of the same input together, in order."""
    by_input: dict[str, list[Product]] = {}
    for product in products:
        by_input.setdefault(product.input, []).append(product)
    return [
        ProductGroup(name, [p.output for p in same], [p.linear for p in same])
        for name, same in by_input.items()
    ]


def _pack(graph: OnnxGraph, node: Node) -> _core.Linear | None:
    values = attributes(node)
    x, *constants = input_names(node, 6)
    quants, scales, zero_points, group_indices, bias = (
        graph.constant(name) if name else None for name in constants
    )
    if (
        not (x and node.output[0])
        or values.get("accuracy_level", 0) != INT8_ACTIVATIONS
        or graph.constant(x) is not None
        or quants is None
        or scales is None
        or scales.elem_type != _FLOAT
        or group_indices is not None
        or (zero_points is not None and zero_points.elem_type != _UINT8)
        or (bias is not None and bias.elem_type != _FLOAT)
    ):
        return None
    n_outputs, n_inputs = values["N"], values["K"]
    if zero_points is not None and len(zero_points.data) % n_outputs:
        return None

    def rows(array: NDArray[Any]) -> NDArray[Any]:
        return array.reshape(n_outputs, -1)

    blocks = unpack_blocks(
        rows(quants.array()),
        rows(scales.array()),
        None if zero_points is None else rows(zero_points.array()),
        bits=values.get("bits", 4),
        n_inputs=n_inputs,
        block_size=values["block_size"],
    )
    if blocks is None:
        return None
    type_name, data = blocks
    return _core.Linear(
        data.data.cast("B"),
        type_name,
        n_outputs,
        n_inputs,
        None if bias is None else bias.array().reshape(-1)[:n_outputs],
    )

"""What profiles and ``calibrate`` need to know of a layer: where its attention's output goes.

The error of a head is what it adds to the residual stream. So the projection behind the attention
is looked for, and the value to which its output is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .blocks import dequantize_blocks
from .cut import Site
from .data import OnnxTensor
from .graph import OnnxGraph, attributes, input_names
from .messages import Node
from .plan import ValueShape
from .sites import AttentionSite

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOVES = ("Cast", "Identity", "Reshape", "Transpose")
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_SUMS = ("Add", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_MAX_STEPS = 12
_PRODUCTS = ("FusedMatMul", "Gemm", "MatMul", "MatMulNBits")
_FLOATS, _UINT8 = (1, 10), 2


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """The ``product`` that projects what a layer attends to, of ``n_outputs`` each, and the
    ``residual`` value [1, n, n_outputs] that this is added to."""

    product: Node
    residual: str
    n_outputs: int

    def weights(self, graph: OnnxGraph) -> NDArray[np.float32]:
        """The projection [n_outputs, n_inputs]."""
        node, values = self.product, attributes(self.product)
        if node.op_type != "MatMulNBits":
            matrix = _constant(graph, node.input[1]).array().astype(np.float32)
            return np.ascontiguousarray(matrix if values.get("transB") else matrix.T)
        quants, scales = (_constant(graph, name).array() for name in node.input[1:3])
        zeros = input_names(node, 4)[3]
        return dequantize_blocks(
            quants.reshape(self.n_outputs, -1),
            scales.reshape(self.n_outputs, -1).astype(np.float32),
            _constant(graph, zeros).array() if zeros else None,
            bits=values.get("bits", 4),
            n_inputs=values["K"],
            block_size=values["block_size"],
        )


def find_outputs(
    graph: OnnxGraph,
    sites: Sequence[Site],
    width: int,
    shapes: Mapping[str, ValueShape],
) -> list[LayerOutput]:
    """Of every layer, whose heads give ``width`` numbers; ``shapes`` are of what crosses segments.

    Empty if a layer has another structure or no heads, weights that are not read here, or sinks.
    """
    outputs = []
    for site in sites:
        if not isinstance(site, AttentionSite):
            return []
        found = None if site.sinks else _find_output(graph, site, width)
        shape = None if found is None else shapes.get(found.residual)
        if found is None or shape is None or shape.dims != (1, -1, found.n_outputs):
            return []
        outputs.append(found)
    return outputs if len({output.n_outputs for output in outputs}) == 1 else []


def _constant(graph: OnnxGraph, name: str) -> OnnxTensor:
    tensor = graph.constant(name)
    assert tensor is not None, "it was found"
    return tensor


def _find_output(graph: OnnxGraph, site: AttentionSite, width: int) -> LayerOutput | None:
    product, value = None, site.output
    for _ in range(_MAX_STEPS):
        readers = [node for node in graph.consumers(value) if node.op_type != "Shape"]
        if len(readers) != 1:
            return None
        node = readers[0]
        if product is None:
            if node.op_type in _PRODUCTS:
                product = node
            elif node.op_type not in _MOVES:
                return None
        elif node.op_type in _SUMS:
            # A bias is a constant, and so are the weights of a norm.
            others = [name for name in node.input if name and name != value]
            streams = [name for name in others if graph.constant(name) is None]
            if len(streams) > 1:
                return None
            if streams:
                n_outputs = _count_outputs(graph, product, width)
                return LayerOutput(product, streams[0], n_outputs) if n_outputs else None
        elif node.op_type not in (*_MOVES, *_NORMS, "Mul"):
            return None
        value = node.output[0]
    return None


def _count_outputs(graph: OnnxGraph, node: Node, width: int) -> int:
    """Outputs of a product of ``width`` inputs whose weights can be read, else 0."""
    values, names = attributes(node), input_names(node, 5)
    tensors = [graph.constant(name) if name else None for name in names]
    weight, scales = tensors[1:3]
    if weight is None or values.get("transA") or values.get("alpha", 1.0) != 1.0:
        return 0
    if node.op_type == "MatMulNBits":
        zeros = tensors[3]
        is_known = scales is not None and scales.elem_type in _FLOATS and not names[4]
        is_known &= values.get("bits", 4) in (4, 8) and values["K"] == width
        is_known &= not names[3] or (zeros is not None and zeros.elem_type == _UINT8)
        return values["N"] if is_known else 0
    if weight.elem_type not in _FLOATS or len(weight.shape) != 2:
        return 0
    n_inputs, n_outputs = weight.shape[:: -1 if values.get("transB") else 1]
    return n_outputs if n_inputs == width else 0

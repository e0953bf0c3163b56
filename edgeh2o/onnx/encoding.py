"""Writes the ONNX models that onnxruntime is given: those of segments and of trials.

Fields are numbered as in onnx.proto. Of nodes that come from a file goes in what was read of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from .data import number_bytes
from .messages import (
    EXTERNAL,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    STRING,
    STRINGS,
    TENSOR,
    TENSORS,
    Attribute,
    Node,
    Tensor,
    ValueInfo,
)
from .wire import bytes_field, float_field, integer_field, packed_integers


def make_node(
    op_type: str, inputs: Sequence[str], outputs: Sequence[str], **settings: int | Sequence[int]
) -> Node:
    """A node of the operators of ONNX, with integers for attributes."""
    attributes = [
        Attribute(name, INT, value)
        if isinstance(value, int)
        else Attribute(name, INTS, tuple(value))
        for name, value in settings.items()
    ]
    return Node(op_type, inputs, outputs, attribute=attributes)


def encode_model(
    name: str,
    nodes: Sequence[Node],
    *,
    inputs: Sequence[ValueInfo],
    outputs: Sequence[str],
    initializers: Sequence[Tensor],
    opsets: Mapping[str, int],
    ir_version: int,
) -> bytes:
    """A ModelProto; the types of its outputs are left to onnxruntime."""
    graph = [bytes_field(1, encode_node(node)) for node in nodes]
    graph.append(bytes_field(2, name))
    graph += [bytes_field(5, encode_tensor(tensor)) for tensor in initializers]
    graph += [bytes_field(11, _encode_info(info)) for info in inputs]
    graph += [bytes_field(12, bytes_field(1, output)) for output in outputs]
    parts = [integer_field(1, ir_version), bytes_field(7, b"".join(graph))]
    parts += [
        bytes_field(8, bytes_field(1, domain) + integer_field(2, version))
        for domain, version in opsets.items()
    ]
    return b"".join(parts)


def encode_node(node: Node) -> bytes:
    """A NodeProto."""
    parts = [bytes_field(1, name) for name in node.input]
    parts += [bytes_field(2, name) for name in node.output]
    parts += [bytes_field(3, node.name), bytes_field(4, node.op_type)]
    parts += [bytes_field(5, encode_attribute(attribute)) for attribute in node.attribute]
    parts.append(bytes_field(7, node.domain))
    return b"".join(parts)


def encode_attribute(attribute: Attribute) -> bytes:
    """An AttributeProto of a type that is read."""
    kind, value = attribute.kind, attribute.value
    name, end = bytes_field(1, attribute.name), integer_field(20, kind)
    return b"".join((name, _encode_value(kind, value), end))


def _encode_value(kind: int, value: Any) -> bytes:
    if kind == FLOAT:
        return float_field(2, value)
    if kind == INT:
        return integer_field(3, value)
    if kind == STRING:
        return bytes_field(4, value)
    if kind == TENSOR:
        return bytes_field(5, encode_tensor(value))
    if kind == FLOATS:
        return bytes_field(7, struct.pack(f"<{len(value)}f", *value))
    if kind == INTS:
        return packed_integers(8, value)
    if kind == STRINGS:
        return b"".join(bytes_field(9, text) for text in value)
    assert kind == TENSORS, "others were refused"
    return b"".join(bytes_field(10, encode_tensor(tensor)) for tensor in value)


def encode_tensor(tensor: Tensor) -> bytes:
    """A TensorProto: its bytes, or where they are."""
    parts = [packed_integers(1, tensor.dims), integer_field(2, tensor.elem_type)]
    parts.append(bytes_field(8, tensor.name))
    if tensor.external is None:
        parts.append(bytes_field(9, number_bytes(tensor)))
        return b"".join(parts)
    for key, text in tensor.external:
        parts.append(bytes_field(13, bytes_field(1, key) + bytes_field(2, text)))
    parts.append(integer_field(14, EXTERNAL))
    return b"".join(parts)


def _encode_info(info: ValueInfo) -> bytes:
    kind = integer_field(1, info.elem_type)
    if info.dims is not None:
        dims = (bytes_field(1, integer_field(1, size)) for size in info.dims)
        kind += bytes_field(2, b"".join(dims))
    return bytes_field(1, info.name) + bytes_field(2, bytes_field(1, kind))

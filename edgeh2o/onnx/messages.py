"""The messages of an ONNX file (onnx.proto) that a decoder has, without the package ``onnx``.

Importing that takes longer than reading a file. What is not read here, such as texts for people
and inferred shapes, is not written either: onnxruntime is given only what was understood and
checked. Files are untrusted: all readers raise FormatError for what is malformed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import FormatError
from ..formats.metadata import quote
from .wire import (
    BYTES,
    FIXED32,
    VARINT,
    read_fields,
    read_text,
    read_varints,
    signed,
)

_CURE = "the file is damaged, fetch it again"
FLOAT, INT, STRING, TENSOR, GRAPH, FLOATS, INTS, STRINGS, TENSORS, GRAPHS = range(1, 11)
EXTERNAL = 1
# Types of attributes whose values are read.
READ_KINDS = frozenset((FLOAT, INT, STRING, TENSOR, FLOATS, INTS, STRINGS, TENSORS))
# By field of a TensorProto: how numbers are packed there.
_NUMBERS = {4: "<f4", 10: "<f8"}
_INTEGERS = (5, 7, 11)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A TensorProto. ``raw`` and ``external`` are None where it has none; ``numbers`` are those
    of the fields for single numbers, by field."""

    name: str = ""
    elem_type: int = 0
    dims: tuple[int, ...] = ()
    raw: bytes | None = None
    numbers: Mapping[int, Any] | None = None
    external: tuple[tuple[str, str], ...] | None = None
    has_segment: bool = False


@dataclass(frozen=True, slots=True)
class Attribute:
    """An AttributeProto: its type and the value of that type; None for types that are not read."""

    name: str
    kind: int
    value: Any
    has_graph: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A NodeProto. ``source`` is what the file has, empty for one that was made here."""

    op_type: str
    input: Sequence[str]
    output: Sequence[str]
    name: str = ""
    domain: str = ""
    attribute: Sequence[Attribute] = ()
    source: bytes = b""


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """A ValueInfoProto of a tensor: element type 0 for anything else, dimensions 0 where open.

    ``dims`` are None where the rank is open.
    """

    name: str
    elem_type: int = 0
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """A GraphProto."""

    node: Sequence[Node]
    initializer: Sequence[Tensor]
    input: Sequence[ValueInfo]
    output: Sequence[ValueInfo]
    has_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A ModelProto; ``functions`` are their names, ``opsets`` (domain, version)."""

    graph: Graph
    ir_version: int
    opsets: Sequence[tuple[str, int]]
    properties: Sequence[tuple[str, str]]
    functions: Sequence[str]


def read_model(data: memoryview) -> Model:
    """The model of a file. Raises FormatError."""
    graphs: list[memoryview] = []
    numbers, lists = _read(data, {1: VARINT, 7: BYTES, 8: BYTES, 14: BYTES, 25: BYTES})
    graphs = lists[7]
    if len(graphs) > 1:  # protobuf would merge them
        raise FormatError(f"the file has {len(graphs)} graphs; {_CURE}")
    names = [_read(function, {1: BYTES})[1][1] for function in lists[25]]
    return Model(
        graph=_read_graph(graphs[0] if graphs else memoryview(b"")),
        ir_version=numbers.get(1, 0),
        opsets=[_read_opset(each) for each in lists[8]],
        properties=[_read_entry(each) for each in lists[14]],
        functions=[_last_text(texts) for texts in names],
    )


def _read(
    data: memoryview, known: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, list[memoryview]]]:
    """The ``known`` fields, by wire type: the last integers, and all that are bytes."""
    integers: dict[int, int] = {}
    lists: dict[int, list[memoryview]] = {n: [] for n, kind in known.items() if kind == BYTES}
    for number, kind, value in read_fields(data):
        expected = known.get(number)
        if expected is None:
            continue
        if kind != expected:
            raise FormatError(f"field {number} is of wire type {kind}; {_CURE}")
        if isinstance(value, int):
            integers[number] = signed(value)
        else:
            lists[number].append(value)
    return integers, lists


def _last_text(texts: Sequence[memoryview]) -> str:
    return read_text(texts[-1]) if texts else ""


def _only(messages: Sequence[memoryview], what: str) -> memoryview | None:
    """A message that must not be there twice: protobuf would merge the two."""
    if len(messages) > 1:
        raise FormatError(f"{what} is given twice; {_CURE}")
    return messages[0] if messages else None


_ENTRY = {1: BYTES, 2: BYTES}
_OPSET = {1: BYTES, 2: VARINT}
_GRAPH = dict.fromkeys((1, 5, 11, 12, 15), BYTES)
_NODE = dict.fromkeys((1, 2, 3, 4, 5, 7), BYTES)
_INFO = dict.fromkeys((1, 2), BYTES)


def _read_entry(data: memoryview) -> tuple[str, str]:
    _, texts = _read(data, _ENTRY)
    return _last_text(texts[1]), _last_text(texts[2])


def _read_opset(data: memoryview) -> tuple[str, int]:
    integers, texts = _read(data, _OPSET)
    return _last_text(texts[1]), integers.get(2, 0)


def _read_graph(data: memoryview) -> Graph:
    _, parts = _read(data, _GRAPH)
    # Layers repeat each other's attributes: equal bytes are read once.
    known: dict[bytes, Attribute] = {}
    return Graph(
        node=[read_node(each, known) for each in parts[1]],
        initializer=[read_tensor(each) for each in parts[5]],
        input=[_read_info(each) for each in parts[11]],
        output=[_read_info(each) for each in parts[12]],
        has_sparse=bool(parts[15]),
    )


def read_node(data: memoryview, known: dict[bytes, Attribute]) -> Node:
    """A NodeProto; attributes are looked up in ``known`` by their bytes, and added to it."""
    _, parts = _read(data, _NODE)
    attributes = []
    for each in parts[5]:
        key = bytes(each)
        found = known.get(key)
        if found is None:
            found = known[key] = read_attribute(each)
        attributes.append(found)
    return Node(
        op_type=_last_text(parts[4]),
        input=[read_text(each) for each in parts[1]],
        output=[read_text(each) for each in parts[2]],
        name=_last_text(parts[3]),
        domain=_last_text(parts[7]),
        attribute=attributes,
        source=bytes(data),
    )


def _read_info(data: memoryview) -> ValueInfo:
    _, parts = _read(data, _INFO)
    name = _last_text(parts[1])
    what = f"the type of {quote(name)}"
    kind = _only(parts[2], what)
    tensor = None if kind is None else _only(_read(kind, {1: BYTES})[1][1], what)
    if tensor is None:
        return ValueInfo(name)
    integers, lists = _read(tensor, {1: VARINT, 2: BYTES})
    shape = _only(lists[2], what)
    dims = None
    if shape is not None:
        # A size and a name exclude each other, the later counts: here both make it open.
        sizes = [_read(dim, {1: VARINT, 2: BYTES}) for dim in _read(shape, {1: BYTES})[1][1]]
        dims = tuple(0 if names[2] else size.get(1, 0) for size, names in sizes)
    return ValueInfo(name, integers.get(1, 0), dims)


def read_tensor(data: memoryview) -> Tensor:
    """A TensorProto. Raises FormatError."""
    name, elem_type, location, raw, has_segment = "", 0, 0, None, False
    dims: list[int] = []
    numbers: dict[int, Any] = {}
    entries: list[tuple[str, str]] = []
    for number, kind, value in read_fields(data):
        if isinstance(value, int):
            if number == 1:
                dims.append(signed(value))
            elif number == 2:
                elem_type = signed(value)
            elif number == 14:
                location = signed(value)
            elif number in _INTEGERS:
                numbers.setdefault(number, []).append(signed(value))
            continue
        if number == 8 and kind == BYTES:
            name = read_text(value)
        elif number == 9 and kind == BYTES:
            raw = bytes(value)
        elif number == 13 and kind == BYTES:
            entries.append(_read_entry(value))
        elif number == 1 and kind == BYTES:
            dims += read_varints(value)
        elif number == 3:
            has_segment = True
        elif number in _NUMBERS:
            numbers[number] = numbers.get(number, b"") + bytes(value)
        elif number in _INTEGERS and kind == BYTES:
            numbers.setdefault(number, []).extend(read_varints(value))
    external = tuple(entries) if location == EXTERNAL else None
    return Tensor(name, elem_type, tuple(dims), raw, numbers, external, has_segment)


def read_attribute(data: memoryview) -> Attribute:
    """An AttributeProto. Raises FormatError, also for one that stands for a function's."""
    name, kind, has_graph = "", 0, False
    values: dict[int, list[Any]] = {n: [] for n in range(1, 11)}
    for number, wire, value in read_fields(data):
        if number == 1 and wire == BYTES:
            name = read_text(value)  # type: ignore[arg-type]
        elif number == 20 and isinstance(value, int):
            kind = signed(value)
        elif number == 21:
            raise FormatError(f"an attribute stands for one of a function; {_CURE}")
        elif number in (6, 11):
            has_graph = True
        elif (reader := _ATTRIBUTE_FIELDS.get((number, wire))) is not None:
            place, read = reader
            values[place] += read(value)
    found = values.get(kind, [])
    if kind == TENSOR and len(found) != 1:
        raise FormatError(f"the attribute {quote(name)} has {len(found)} tensors; {_CURE}")
    if kind in _UNSET:
        return Attribute(name, kind, found[-1] if found else _UNSET[kind], has_graph)
    return Attribute(name, kind, tuple(found) if kind in READ_KINDS else None, has_graph)


# Types of attributes with one value, and what it is where it is left out.
_UNSET: Mapping[int, Any] = {FLOAT: 0.0, INT: 0, STRING: b"", TENSOR: None}


def _floats(data: Any) -> list[float]:
    if len(data) % 4:
        raise FormatError(f"a list of floats has {len(data)} bytes; {_CURE}")
    return list(struct.unpack(f"<{len(data) // 4}f", data))


# By number and wire type of a field: the type of attribute, and what reads it.
_ATTRIBUTE_FIELDS: Mapping[tuple[int, int], tuple[int, Callable[[Any], list[Any]]]] = {
    (2, FIXED32): (FLOAT, _floats),
    (3, VARINT): (INT, lambda value: [signed(value)]),
    (4, BYTES): (STRING, lambda value: [bytes(value)]),
    (5, BYTES): (TENSOR, lambda value: [read_tensor(value)]),
    (7, FIXED32): (FLOATS, _floats),
    (7, BYTES): (FLOATS, _floats),
    (8, VARINT): (INTS, lambda value: [signed(value)]),
    (8, BYTES): (INTS, read_varints),
    (9, BYTES): (STRINGS, lambda value: [bytes(value)]),
    (10, BYTES): (TENSORS, lambda value: [read_tensor(value)]),
}

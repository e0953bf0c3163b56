"""Caches that a converter to float16 left in float32 at the border of the graph.

``convert_float_to_float16(keep_io_types=True)`` of onnxruntime and onnxconverter-common casts every
input once and every output once. The caches are our own: without these casts they are float16.
"""

from __future__ import annotations

from dataclasses import replace

from .messages import Graph, Node, ValueInfo

_FLOAT, _FLOAT16 = 1, 10


def drop_casts_of_caches(graph: Graph) -> Graph:
    """The graph with float16 inputs and ``present`` outputs where each was cast to it, or from it.

    It is returned as it is where there are no such casts.
    """
    floats = {info.name for info in graph.input if info.elem_type == _FLOAT}
    presents = {info.name for info in graph.output if info.name.startswith("present")}
    readers: dict[str, list[Node]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    names: dict[str, str] = {}
    halved, dropped = set(), set()
    for node in graph.node:
        if node.op_type != "Cast" or len(node.input) != 1 or len(node.output) != 1:
            continue
        source, target = node.input[0], node.output[0]
        kind = next((each.value for each in node.attribute if each.name == "to"), None)
        if source in floats and kind == _FLOAT16 and _are_casts_or_shapes(readers[source]):
            names[target] = source
            halved.add(source)
            dropped.add(id(node))
        elif target in presents and kind == _FLOAT and target not in readers:
            names[source] = target
            dropped.add(id(node))
    if not halved:
        return graph
    return replace(
        graph,
        node=[_renamed(node, names) for node in graph.node if id(node) not in dropped],
        input=[_halved(info) if info.name in halved else info for info in graph.input],
    )


def _are_casts_or_shapes(nodes: list[Node]) -> bool:
    casts = [node for node in nodes if node.op_type != "Shape"]
    return len(casts) == 1 and casts[0].op_type == "Cast"


def _renamed(node: Node, names: dict[str, str]) -> Node:
    return replace(
        node,
        input=[names.get(name, name) for name in node.input],
        output=[names.get(name, name) for name in node.output],
    )


def _halved(info: ValueInfo) -> ValueInfo:
    return replace(info, elem_type=_FLOAT16)

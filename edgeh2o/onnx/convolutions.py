"""Finds the short convolutions of an ONNX decoder (LFM2), each with the two gates around it.

CausalConvWithState keeps the last inputs of a convolution from call to call. Between
``Transpose - Split - Mul`` before it and ``Mul - Transpose`` behind it, that is a layer's mixer.
onnxruntime may have moved the first Transpose behind the Mul, and fused the last one with the
product that reads it. Anything else around it is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import FormatError
from ..formats.metadata import quote
from ..layer_config import MAX_CONV_TAPS
from .graph import OnnxGraph, attributes, describe_node, input_names
from .messages import Node
from .sites import CONVOLUTION, known_attributes, known_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSite:
    """A short convolution between two gates, which ends with ``node``.

    ``source`` names [1, n, 3 * dim], in every row b, c and y side by side. ``output`` [1, n, dim]
    (or [1, dim, n], if ``is_channel_major``) is c times the causal convolution of b * y with
    ``weights`` [dim, 1, n_taps]. ``past`` is its cache.
    """

    node: Node
    source: str
    weights: str
    past: str
    dim: int
    n_taps: int
    is_channel_major: bool

    @property
    def output(self) -> str:
        """The value that it computes."""
        return str(self.node.output[0])

    @property
    def sources(self) -> dict[str, str]:
        """The values that it reads, by what they are."""
        return {"bcy": self.source}

    @property
    def n_recurrent(self) -> int:
        """Numbers that it keeps from token to token."""
        return (self.n_taps - 1) * self.dim


def find_convolutions(graph: OnnxGraph) -> list[ConvolutionSite]:
    """The convolutions of a decoder, in graph order.

    Raises FormatError that names the node for one that cannot be replaced.
    """
    return [_read(graph, node) for node in graph.nodes if node.op_type == CONVOLUTION]


def _read(graph: OnnxGraph, node: Node) -> ConvolutionSite:
    known_attributes(
        node,
        "",
        {
            "activation": ("none",),
            "ndim": (1,),
            "dilation": (1,),
            "channels_last": (0,),
            "state_window": (0,),
            "state_length": (0,),
            "state_update_capacity": (0,),
            "state_channels_last": (-1,),
            "input_channel_offset": (0,),
            "input_channels": (0,),
        },
    )
    gated, weights, _, past = known_inputs(node, 4, {2: "a bias"})
    if not past:
        raise FormatError(f"{describe_node(node)} has no cache; export the model with one")
    if any(graph.consumers(name) for name in node.output[1:] if name):
        raise _refusal(node, "the model reads its cache itself")
    tensor = graph.constant(weights)
    if tensor is None or len(tensor.shape) != 3 or tensor.shape[1] != 1:
        raise _refusal(node, f"its weights {quote(weights)} are no constant [channels, 1, taps]")
    dim, _, n_taps = tensor.shape
    if not (dim >= 1 and 2 <= n_taps <= MAX_CONV_TAPS):
        raise _refusal(node, f"its weights are [{dim}, 1, {n_taps}]")
    second = _only_reader(graph, node, node.output[0], "Mul")
    (c,) = [name for name in second.input if name != node.output[0]] or [""]
    readers = graph.consumers(second.output[0])
    is_channel_major = [each.op_type for each in readers] != ["Transpose"]
    behind = second
    if not is_channel_major:
        behind = _only_reader(graph, node, second.output[0], "Transpose")
        _check_exchange(node, behind)
    before = graph.producers.get(gated)
    is_moved = before is not None and before.op_type == "Transpose"
    if is_moved:
        gated, c = (_before_exchange(graph, node, value) for value in (gated, c))
    first = _only_producer(graph, node, gated, "Mul")
    split = _only_producer(graph, node, c, "Split")
    parts = list(split.output)
    if len(parts) != 3 or c != parts[1] or sorted(first.input) != sorted([parts[0], parts[2]]):
        raise _refusal(node, "its gates are not the parts of one projection")
    for name in (parts[0], parts[2]):
        _only_producer(graph, node, name, "Split")
    if not _splits_channels(graph, split, dim, (2, -1) if is_moved else (1, -2)):
        raise _refusal(node, f"{describe_node(split)} does not part {3 * dim} channels in three")
    source = split.input[0] if is_moved else _before_exchange(graph, node, split.input[0])
    return ConvolutionSite(
        node=behind,
        source=source,
        weights=weights,
        past=past,
        dim=dim,
        n_taps=n_taps,
        is_channel_major=is_channel_major,
    )


def _before_exchange(graph: OnnxGraph, node: Node, value: str) -> str:
    """What ``value`` is with channels and tokens exchanged."""
    found = _only_producer(graph, node, value, "Transpose")
    _check_exchange(node, found)
    return found.input[0]


def _check_exchange(node: Node, transpose: Node) -> None:
    if list(attributes(transpose).get("perm", ())) != [0, 2, 1]:
        raise _refusal(node, f"{describe_node(transpose)} does not exchange channels and tokens")


def _splits_channels(graph: OnnxGraph, split: Node, dim: int, axes: tuple[int, int]) -> bool:
    values = attributes(split)
    sizes = values.get("split")
    name = input_names(split, 2)[1]
    if name:
        constant = graph.constant(name)
        sizes = None if constant is None else constant.array().tolist()
    # Parts of no given sizes are equal; the row as a whole is checked when it is tried out.
    return values.get("axis", 0) in axes and (sizes is None or list(sizes) == [dim] * 3)


def _only_producer(graph: OnnxGraph, node: Node, value: str, op_type: str) -> Node:
    """What computes ``value`` for one reader alone."""
    found = graph.producers.get(value)
    if found is None or found.op_type != op_type or found.domain not in ("", "ai.onnx"):
        raise _refusal(node, f"{quote(value)} is not the output of a {op_type}")
    _check_reader(graph, node, value)
    return found


def _only_reader(graph: OnnxGraph, node: Node, value: str, op_type: str) -> Node:
    _check_reader(graph, node, value)
    (found,) = graph.consumers(value)
    if found.op_type != op_type or found.domain not in ("", "ai.onnx"):
        raise _refusal(node, f"{quote(value)} goes to {describe_node(found)}")
    return found


def _check_reader(graph: OnnxGraph, node: Node, value: str) -> None:
    readers = graph.consumers(value)
    if len(readers) != 1 or list(readers[0].input).count(value) != 1 or value in graph.outputs:
        raise _refusal(node, f"{quote(value)} has {len(readers)} readers")


def _refusal(node: Node, why: str) -> FormatError:
    return FormatError(
        f"{describe_node(node)}: {why}. Known is the gated convolution of LFM2 as "
        "onnxruntime-genai's model builder writes it; export the model with that, or run a GGUF "
        "file of it"
    )

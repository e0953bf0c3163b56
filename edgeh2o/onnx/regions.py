"""The nodes between what goes into an attention of several nodes and what comes out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ..errors import FormatError
from .cut import MASK, POSITIONS, TOKENS
from .graph import OnnxGraph, describe_node, describe_nodes
from .messages import Node
from .sites import AttentionSite, is_past

CURE = (
    "export the model with onnxruntime-genai's model builder, or by torch.onnx with dynamo=True "
    "and opset 23"
)
MAX_NODES = 1024
MAX_CONSTANT_BYTES = 2**28


@dataclass(slots=True)
class Region:
    """The nodes of an attention, and what they read besides queries, new keys and values.

    ``embedded`` has values whose shape alone is read, [1, n, width], and their widths.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, None] = field(default_factory=dict)
    constants: dict[str, None] = field(default_factory=dict)
    embedded: dict[str, int] = field(default_factory=dict)


def collect_region(graph: OnnxGraph, site: AttentionSite) -> Region:
    """What computes a site's output. Raises FormatError if it needs anything but its inputs."""
    region, needed = Region(), set[int]()
    waiting = [site.output]
    own = {site.past_key, site.past_value}
    readers: dict[str, Node] = {site.output: site.node}
    while waiting:
        name = waiting.pop()
        if name in (site.q, site.k, site.v):
            continue
        if name in graph.tensors:
            region.constants[name] = None
            continue
        if name in graph.inputs:
            reader = readers[name]
            reads_shape = reader.op_type == "Shape"
            if not (
                name in own
                or name in (POSITIONS, MASK)
                or (reads_shape and (name == TOKENS or is_past(name)))
            ):
                raise refusal(site, f"its mask depends on {describe_node(reader)}")
            region.inputs[name] = None
            continue
        node = graph.producers[name]
        if id(node) in needed:
            continue
        if readers[name].op_type == "Shape":
            width = _embedding_width(graph, name)
            if width:
                region.embedded[name] = width
                continue
        needed.add(id(node))
        for source in filter(None, node.input):
            readers[source] = node
            waiting.append(source)
        if len(needed) > MAX_NODES:
            raise refusal(site, f"it has more than {MAX_NODES} nodes")
    n_bytes = sum(len(graph.tensors[name].data) for name in region.constants)
    if n_bytes > MAX_CONSTANT_BYTES:
        raise refusal(site, f"it reads constants of {n_bytes} bytes")
    region.nodes = [node for node in graph.nodes if id(node) in needed]
    return region


def _embedding_width(graph: OnnxGraph, name: str) -> int:
    """The width of a value [1, n, width] that is the embedding of the tokens; 0 of any other."""
    for _ in range(4):
        node = graph.producers.get(name)
        if node is None:
            return 0
        if node.op_type == "Gather" and node.input[1] == TOKENS:
            table = graph.constant(node.input[0])
            return table.shape[1] if table is not None and len(table.shape) == 2 else 0
        if node.op_type not in ("Cast", "DequantizeLinear", "Identity", "Mul"):
            return 0
        name = node.input[0]
    return 0


def region_signature(graph: OnnxGraph, region: Region, site: AttentionSite) -> Hashable:
    """Equal for regions that differ in the names of values only."""
    names: dict[str, Hashable] = {site.q: "q", site.k: "k", site.v: "v"}
    names |= {name: "past" if is_past(name) else name for name in region.inputs}
    names |= dict.fromkeys(region.embedded, "embedded")
    names |= {site.past_key: "past keys", site.past_value: "past values"}
    for name in region.constants:
        tensor = graph.tensors[name]
        names[name] = (tensor.elem_type, tensor.shape, bytes(tensor.data))
    heads = (site.n_heads, site.n_kv_heads, site.head_major)
    return heads, describe_nodes(region.nodes, names)


def refusal(site: AttentionSite, why: str) -> FormatError:
    return FormatError(
        f"the attention that ends at {describe_node(site.node)} is made of several nodes, "
        f"and {why}: it is not known to be that of a causal decoder; {CURE}"
    )

"""Cuts an ONNX decoder at what edgeh2o computes: its attention, and matrix products.

Stage i is a segment of the graph, which onnxruntime runs, followed by those products and that
attention or short convolution whose inputs are then all there; their outputs begin stage i + 1. A
value that a later stage needs too, such as the residual stream, crosses the cut as a tensor. What
depends only on constants and on the shapes of the inputs is computed anew wherever it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import FormatError
from ..formats.metadata import quote
from .convolutions import ConvolutionSite
from .encoding import make_node
from .graph import OnnxGraph, attributes, describe_node
from .messages import Node
from .products import Product
from .sites import AttentionSite, is_past

# What mixes the tokens of a layer.
Site: TypeAlias = AttentionSite | ConvolutionSite
TOKENS, POSITIONS, MASK = "input_ids", "position_ids", "attention_mask"
# Stands for Shape(past key or value): int64 [4].
PAST_SHAPE = "edgeh2o/past_shape"
LOGITS = "logits"
# A segment's inputs that the runner fills itself.
CONTEXT_INPUTS = (TOKENS, POSITIONS, MASK, PAST_SHAPE)


@dataclass(slots=True)
class Segment:
    """Nodes between two cuts: what they read from outside and what others need of them."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stage:
    """A segment, and what edgeh2o computes after it."""

    segment: Segment
    products: Sequence[Product]
    site: Site | None


@dataclass(frozen=True, slots=True)
class Cut:
    """The stages in the order they run. ``masks`` computes the masks of all sites."""

    graph: OnnxGraph
    stages: Sequence[Stage]
    masks: Segment

    @property
    def sites(self) -> list[Site]:
        """What mixes the tokens of each layer."""
        return [stage.site for stage in self.stages if stage.site is not None]

    @property
    def attention(self) -> list[AttentionSite]:
        """The attention of those layers that have it."""
        return attention_of(self.sites)


def attention_of(sites: Iterable[Site]) -> list[AttentionSite]:
    """Those of the sites that are attention."""
    return [site for site in sites if isinstance(site, AttentionSite)]


def cut_decoder(graph: OnnxGraph, sites: Sequence[Site], products: Sequence[Product] = ()) -> Cut:
    """Cuts at all ``sites``, and at ``products``.

    Raises FormatError for a graph that is no plain decoder.
    """
    return _Cutter(graph, sites, products).cut()


class _Cutter:
    def __init__(
        self, graph: OnnxGraph, sites: Sequence[Site], products: Sequence[Product]
    ) -> None:
        attention = attention_of(sites)
        if not attention:
            raise FormatError(_explain_missing_attention(graph))
        if LOGITS not in graph.outputs:
            raise FormatError(
                f"the model has no output {LOGITS!r} but {_list(graph.outputs)}; "
                "export it as a language model (text-generation-with-past)"
            )
        if TOKENS not in graph.inputs:
            raise FormatError(
                f"the model has no input {TOKENS!r} but {_list(graph.inputs)}; export it with its "
                "embedding"
            )
        self._graph = graph
        head_major = {site.output for site in attention if "o" in site.head_major}
        products = [product for product in products if product.input not in head_major]
        # What edgeh2o computes: names of its inputs by the name of its output.
        self._reads = {site.output: list(site.sources.values()) for site in sites}
        self._reads |= {product.output: [product.input] for product in products}
        self._site_nodes = {id(site.node) for site in sites}
        self._past_shapes = self._find_past_shapes()
        # Per value, the stage that computes it; None: computed anew where it is needed.
        self._levels: dict[str, int | None] = {}
        self._find_levels()
        self._sites = self._place(sites)
        self._products: dict[int, list[Product]] = {}
        for product in products:
            self._products.setdefault(self._cut_level(product.output), []).append(product)

    def cut(self) -> Cut:
        """The stages, from the last one back: each asks for what it needs of those before."""
        n_stages = 1 + max(
            (level for level in self._levels.values() if level is not None), default=0
        )
        wanted: list[list[str]] = [[] for _ in range(n_stages)]
        for output, names in self._reads.items():
            wanted[self._cut_level(output)] += names
        logits_level = self._levels.get(LOGITS)
        if logits_level is None or logits_level <= max(self._sites):
            raise FormatError("the logits do not follow from the last layer of the model")
        wanted[logits_level].append(LOGITS)
        stages = []
        for level in reversed(range(n_stages)):
            segment = self._collect(level, list(dict.fromkeys(wanted[level])))
            for name in segment.inputs:
                source = self._levels.get(name)
                if source is not None and name not in self._reads:
                    wanted[source].append(name)
            products = self._products.get(level, ())
            stages.append(Stage(segment, products, self._sites.get(level)))
        attention = attention_of(self._sites.values())
        masks = dict.fromkeys(name for site in attention for name, _ in site.masks)
        return Cut(self._graph, stages[::-1], self.context(list(masks)))

    def context(self, names: Sequence[str]) -> Segment:
        """What computes values that depend on the inputs alone, such as masks."""
        segment = self._collect(0, list(names), whole=True)
        for name in segment.inputs:
            if name in self._levels:
                node = self._graph.producers[name]
                raise FormatError(f"a mask of the attention depends on {describe_node(node)}")
        return segment

    def _find_past_shapes(self) -> dict[str, str]:
        """Outputs of Shape nodes on the past, by the node's output."""
        graph = self._graph
        found = {}
        for name in graph.inputs:
            if not is_past(name):
                continue
            for node in graph.consumers(name):
                if node.op_type == "Shape":
                    found[node.output[0]] = name
        return found

    def _find_levels(self) -> None:
        for node in self._graph.nodes:
            reads = self._reads.get(node.output[0])
            if reads is None:
                level = self._node_level(node)
            else:
                level = 1 + max(self._level(name) or 0 for name in reads)
            for output in node.output:
                self._levels.setdefault(output, level)

    def _node_level(self, node: Node) -> int | None:
        if node.op_type == "Shape":
            return None  # of a value that crosses, if need be
        levels = [self._level(name) for name in node.input if name]
        known = [level for level in levels if level is not None]
        return max(known) if known else None

    def _level(self, name: str) -> int | None:
        if name in self._graph.tensors:
            return None
        if name in self._graph.inputs:
            return 0
        return self._levels.get(name)

    def _cut_level(self, output: str) -> int:
        """The stage that ends with what computes ``output``."""
        level = self._levels[output]
        assert level is not None, "it depends on its inputs"
        return level - 1

    def _place(self, sites: Sequence[Site]) -> dict[int, Site]:
        """What ends a stage."""
        placed: dict[int, Site] = {}
        for site in sites:
            level = self._cut_level(site.output)
            if level in placed:
                raise FormatError(
                    f"{describe_node(site.node)} does not follow the layer before it: layers with "
                    "several attentions or convolutions side by side are not supported"
                )
            placed[level] = site
        return dict(sorted(placed.items()))

    def _collect(self, level: int, outputs: list[str], *, whole: bool = False) -> Segment:
        """The nodes of stage ``level`` that compute ``outputs``; ``whole``: of all up to it.

        Those outputs that edgeh2o computed or an earlier stage become inputs.
        """
        needed: set[int] = set()
        inputs: dict[str, None] = {}
        constants: dict[str, None] = {}
        waiting = list(outputs)
        while waiting:
            name = waiting.pop()
            if name in self._graph.tensors:
                constants[name] = None
                continue
            if name in self._past_shapes:
                inputs[PAST_SHAPE] = None
                needed.add(id(self._graph.producers[name]))
                continue
            if name in self._graph.inputs:
                self._check_input(name)
                inputs[name] = None
                continue
            own_level = self._levels[name]
            node = self._graph.producers[name]
            if id(node) in self._site_nodes and name not in self._reads:
                raise FormatError(
                    f"the output {quote(name)} of {describe_node(node)} is read by the model "
                    "itself, which is not supported"
                )
            is_before = own_level is not None and own_level < level
            if name in self._reads or (is_before and not whole):
                inputs[name] = None
            elif id(node) not in needed:
                needed.add(id(node))
                waiting += filter(None, node.input)
        computed = [name for name in outputs if name not in inputs]
        segment = Segment(inputs=list(inputs), outputs=computed, constants=list(constants))
        for node in self._graph.nodes:
            if id(node) in needed:
                is_past_shape = node.output[0] in self._past_shapes
                segment.nodes += _take_past_shape(node) if is_past_shape else [node]
        return segment

    def _check_input(self, name: str) -> None:
        if name in (TOKENS, POSITIONS, MASK):
            return
        if is_past(name):
            node = self._graph.consumers(name)[0]
            raise FormatError(
                f"the cache {quote(name)} is read outside of a known attention, by "
                f"{describe_node(node)}; {_KNOWN}"
            )
        raise FormatError(
            f"the model wants the input {quote(name)}, which this version cannot give; plain "
            "decoders with input_ids, attention_mask, position_ids and past keys and values run"
        )


def _take_past_shape(node: Node) -> list[Node]:
    """Instead of a Shape of the past what takes the same dimensions from the runner's."""
    values = attributes(node)
    dims = list(range(4))[values.get("start", 0) : values.get("end", 4)]
    indices = f"{node.output[0]}/dims"
    return [
        make_node("Constant", [], [indices], value_ints=dims),
        make_node("Gather", [PAST_SHAPE, indices], [node.output[0]], axis=0),
    ]


_KNOWN = (
    "known are GroupQueryAttention, MultiHeadAttention and Attention (opset 23): export the model "
    "with one of them (onnxruntime-genai's model builder does)"
)


def _explain_missing_attention(graph: OnnxGraph) -> str:
    softmax = next((node for node in graph.nodes if node.op_type == "Softmax"), None)
    if softmax is not None:
        return f"the attention at {describe_node(softmax)} is made of single operators; {_KNOWN}"
    operators = sorted({node.op_type for node in graph.nodes})
    return f"no attention was found among the operators {_list(operators)}; {_KNOWN}"


def _list(names: Iterable[str] | Mapping[str, object]) -> str:
    shown = [quote(name, 40) for name in names]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + more

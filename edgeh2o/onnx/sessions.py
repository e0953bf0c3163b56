"""The stages of a decoder, ready to run: sessions of onnxruntime, products, mixers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ..errors import FormatError
from ..formats.metadata import quote
from ..model_config import ModelConfig
from .convolutions import ConvolutionSite
from .cut import MASK, PAST_SHAPE, POSITIONS, TOKENS, Cut, Site, Stage
from .data import element_type
from .encoding import make_node
from .graph import OnnxGraph
from .messages import Node
from .products import ProductGroup, group_products
from .segment_sessions import FLOAT, FLOAT16, INT64, LoadedSegment, SessionMaker
from .sites import AttentionSite


@dataclass(frozen=True, slots=True)
class AttentionValues:
    """Names of the values [1, n, heads * head_dim] of one attention, in float32.

    An empty ``k`` and ``v`` mean that ``q`` holds all three.
    """

    q: str
    k: str
    v: str
    out: str
    width: int  # of the output

    @property
    def sources(self) -> list[str]:
        """The values that it reads."""
        return [name for name in (self.q, self.k, self.v) if name]


@dataclass(frozen=True, slots=True)
class ConvolutionValues:
    """Names of the values of one short convolution in float32: ``bcy`` [1, n, 3 * width] and
    ``out`` [1, n, width]."""

    bcy: str
    out: str
    width: int

    @property
    def sources(self) -> list[str]:
        """The values that it reads, which it changes."""
        return [self.bcy]


MixerValues: TypeAlias = AttentionValues | ConvolutionValues


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage that can run: a session, if there is anything for it, products, a mixer."""

    segment: LoadedSegment | None
    products: Sequence[ProductGroup]
    mixer: MixerValues | None


def _own_name(i: int, what: str) -> str:
    """The name of a value that only crosses between layer ``i``'s mixer and onnxruntime."""
    return f"edgeh2o/{i}/{what}"


class SegmentFactory:
    """Makes the sessions of one cut, in order: the types of the later follow from the earlier.

    Unless it ``packs``, onnxruntime leaves the weights where they are.
    """

    def __init__(
        self, cut: Cut, n_threads: int, config: ModelConfig, *, packs: bool = True
    ) -> None:
        self._cut = cut
        self._sessions = SessionMaker(cut.graph, n_threads, packs=packs)
        self._config = config
        self._types: dict[str, np.dtype[Any]] = {}
        self._layers = {site.output: i for i, site in enumerate(cut.sites)}
        self._n_mixers = 0  # of the stages that were made
        products = [product for stage in cut.stages for product in stage.products]
        self._products = {product.output for product in products}
        # What segments and products read of each other.
        self._read = {product.input for product in products}
        self._read.update(*(stage.segment.inputs for stage in cut.stages))
        graph = cut.graph
        self._context_types = {
            TOKENS: _declared_type(graph, TOKENS),
            POSITIONS: _declared_type(graph, POSITIONS),
            MASK: _declared_type(graph, MASK),
            PAST_SHAPE: INT64,
        }

    def make(self, stage: Stage) -> LoadedStage:
        """A stage. Raises FormatError for what onnxruntime refuses."""
        segment = stage.segment
        nodes = list(segment.nodes)
        outputs = list(segment.outputs)
        renamed: dict[str, str] = {}
        mixer = None
        if stage.site is not None:
            mixer, casts = self._mixer_values(stage.site)
            nodes += casts
            own = [name for name in mixer.sources if name not in self._products]
            # What nobody but the mixer reads is given to it under its own name alone.
            unread = set(stage.site.sources.values()) - self._read
            outputs = own + [name for name in outputs if name not in unread]
        if outputs:
            for name in segment.inputs:
                if name in self._layers:
                    nodes[:0] = self._attended_nodes(name)
                    renamed[name] = _own_name(self._layers[name], "out")
        inputs = [renamed.get(name, name) for name in segment.inputs]
        session = None
        if outputs:
            is_last = self._n_mixers == len(self._layers)
            what = "part after all layers" if is_last else f"part up to layer {self._n_mixers}"
            session = self._start(what, nodes, inputs, outputs, segment.constants)
        groups = [
            replace(group, input=self._place(group.input))
            for group in group_products(stage.products)
        ]
        self._n_mixers += mixer is not None
        return LoadedStage(session, groups, mixer)

    def make_masks(self) -> LoadedSegment | None:
        """The session that computes the masks, None if there are none."""
        segment = self._cut.masks
        if not segment.outputs:
            return None
        return self._start(
            "masks", segment.nodes, segment.inputs, segment.outputs, segment.constants
        )

    def _place(self, name: str) -> str:
        """The name under which a product finds its input."""
        return _own_name(self._layers[name], "out") if name in self._layers else name

    def _mixer_values(self, site: Site) -> tuple[MixerValues, list[Node]]:
        """Where a mixer reads, and the nodes that bring there what is elsewhere."""
        i = self._layers[site.output]
        nodes, names = [], {}
        head_major = site.head_major if isinstance(site, AttentionSite) else ""
        for what, source in site.sources.items():
            # Attention rotates its inputs in place, and a convolution gates them.
            is_its_own = source in self._products and len(self._cut.graph.consumers(source)) == 1
            has_heads = what in head_major
            if is_its_own and not has_heads:
                names[what] = source
                continue
            name = names[what] = _own_name(i, what)
            if has_heads:
                nodes.append(make_node("Transpose", [source], [f"{name}/rows"], perm=[0, 2, 1, 3]))
                source = f"{name}/rows"
            nodes.append(make_node("Cast", [source], [name], to=FLOAT))
        out = _own_name(i, "out")
        if isinstance(site, ConvolutionSite):
            return ConvolutionValues(names["bcy"], out, site.dim), nodes
        q, k, v = (names.get(what, "") for what in "qkv")
        width = self._config.n_heads * self._config.head_dim
        return AttentionValues(q, k, v, out, width), nodes

    def _attended_nodes(self, output: str) -> list[Node]:
        """From what we compute, [1, n, width] in float32, to what the nodes gave."""
        i = self._layers[output]
        site = self._cut.sites[i]
        steps: list[tuple[str, dict[str, Any]]] = []
        if isinstance(site, AttentionSite) and "o" in site.head_major:
            steps += [("Reshape", {}), ("Transpose", {"perm": [0, 2, 1, 3]})]
        if isinstance(site, ConvolutionSite) and site.is_channel_major:
            steps.append(("Transpose", {"perm": [0, 2, 1]}))
        if self._is_half(site):
            steps.append(("Cast", {"to": FLOAT16}))
        if not steps:
            steps.append(("Identity", {}))
        nodes, source = [], _own_name(i, "out")
        for k, (operator, settings) in enumerate(steps):
            target = output if k == len(steps) - 1 else _own_name(i, f"out/{k}")
            names = [source]
            if operator == "Reshape":
                names.append(_own_name(i, "heads"))
                shape = [0, 0, self._config.n_heads, self._config.head_dim]
                nodes.append(make_node("Constant", [], [names[1]], value_ints=shape))
            nodes.append(make_node(operator, names, [target], **settings))
            source = target
        return nodes

    def _is_half(self, site: Site) -> bool:
        if isinstance(site, AttentionSite) and site.gives_half is not None:
            return site.gives_half
        graph = self._cut.graph
        past = site.past_key if isinstance(site, AttentionSite) else site.past
        if past in graph.inputs:
            return graph.inputs[past].elem_type == FLOAT16
        matrices = (t.elem_type for t in graph.tensors.values() if len(t.shape) > 1)
        return FLOAT16 in matrices

    def _start(
        self,
        what: str,
        nodes: Sequence[Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        constants: Sequence[str],
    ) -> LoadedSegment:
        types = {name: self._elem_type(name) for name in inputs}
        segment = self._sessions.make(what, nodes, types, outputs, constants)
        self._types |= segment.outputs
        return segment

    def _elem_type(self, name: str) -> int:
        elem_type = self._context_types.get(name)
        if elem_type is not None:
            return elem_type
        dtype = self._types.get(name, np.dtype(np.float32))
        return element_type(dtype)


def _declared_type(graph: OnnxGraph, name: str) -> int:
    info = graph.inputs.get(name)
    elem_type = INT64 if info is None else info.elem_type
    if elem_type not in (6, INT64) and name != MASK:
        raise FormatError(f"the input {quote(name)} is of element type {elem_type}, not integer")
    return int(elem_type)

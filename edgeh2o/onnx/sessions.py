"""onnxruntime sessions for the segments of a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import FormatError
from ..formats.metadata import quote
from ..model_config import ModelConfig
from .convolutions import ConvolutionSite
from .cut import MASK, PAST_SHAPE, POSITIONS, TOKENS, Cut, Site, Stage
from .graph import OnnxGraph
from .packages import onnx, onnxruntime
from .products import ProductGroup, group_products
from .sites import AttentionSite

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOAT, FLOAT16, INT64 = 1, 10, 7
# Smaller constants go into the segment, where onnxruntime sees shapes and axes while it optimises.
MIN_SHARED_BYTES = 1024
LOG_FATAL = 4
_SESSION_ENTRIES = {
    # Threads of other segments and of the attention need the cores between two runs.
    "session.intra_op.allow_spinning": "0",
    "session.use_env_allocators": "1",
    # Exact sums for signed 8-bit weights. Without VNNI onnxruntime's AVX2 and AVX512 kernels add
    # two products in 16 bits, which saturate: of sums over 512 inputs 5 to 8 % were wrong, by up to
    # 12 % of the largest, and which ones changes with the scale that all rows of a call share.
    # Weights become unsigned where that happens; other machines go on as they are.
    "session.x64quantprecision": "1",
}

# onnxruntime spells most types as NumPy does.
_NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    f"tensor({name})": np.dtype(name)
    for name in ("float16", "double", "int64", "int32", "uint8", "int8", "bool")
} | {"tensor(float)": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """A session and the types of what goes in and comes out, by name."""

    session: onnxruntime.InferenceSession
    inputs: Mapping[str, np.dtype[Any]]
    outputs: Mapping[str, np.dtype[Any]]

    def run(self, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Outputs by name. Raises FormatError if onnxruntime cannot compute them."""
        try:
            values = self.session.run(list(self.outputs), dict(feed))
        except Exception as error:
            raise FormatError(
                f"the model does not run on a few tokens: {reason_of(error)}"
            ) from None
        return dict(zip(self.outputs, values, strict=True))

    def context_feed(self, n_past: int, n_new: int, config: ModelConfig) -> dict[str, NDArray[Any]]:
        """Values of the inputs that depend on positions only; tokens are all 0."""
        values: dict[str, NDArray[Any]] = {
            TOKENS: np.zeros((1, n_new), np.int64),
            POSITIONS: np.arange(n_past, n_past + n_new)[None],
            MASK: np.ones((1, n_past + n_new)),
            PAST_SHAPE: np.array([1, config.n_kv_heads, n_past, config.head_dim], np.int64),
        }
        given = {name: values[name] for name in self.inputs if name in values}
        return {name: value.astype(self.inputs[name]) for name, value in given.items()}


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
        self._packs = packs
        self._n_threads = n_threads
        self._config = config
        self._tensors: dict[str, Any] = {}  # OrtValues over the mapped weights
        self._types: dict[str, np.dtype[Any]] = {}
        self._layers = {site.output: i for i, site in enumerate(cut.sites)}
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
            what = f"segment before {quote(outputs[0])}"
            session = self._start(what, nodes, inputs, outputs, segment.constants)
        groups = [
            replace(group, input=self._place(group.input))
            for group in group_products(stage.products)
        ]
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

    def _mixer_values(self, site: Site) -> tuple[MixerValues, list[onnx.NodeProto]]:
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
                nodes.append(
                    onnx.helper.make_node(
                        "Transpose", [source], [f"{name}/rows"], perm=[0, 2, 1, 3]
                    )
                )
                source = f"{name}/rows"
            nodes.append(onnx.helper.make_node("Cast", [source], [name], to=FLOAT))
        out = _own_name(i, "out")
        if isinstance(site, ConvolutionSite):
            return ConvolutionValues(names["bcy"], out, site.dim), nodes
        q, k, v = (names.get(what, "") for what in "qkv")
        width = self._config.n_heads * self._config.head_dim
        return AttentionValues(q, k, v, out, width), nodes

    def _attended_nodes(self, output: str) -> list[onnx.NodeProto]:
        """From what we compute, [1, n, width] in float32, to what the nodes gave."""
        i = self._layers[output]
        site = self._cut.sites[i]
        steps: list[tuple[str, dict[str, Any]]] = []
        if isinstance(site, AttentionSite) and "o" in site.head_major:
            steps += [("Reshape", {}), ("Transpose", {"perm": [0, 2, 1, 3]})]
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
                nodes.append(onnx.helper.make_node("Constant", [], [names[1]], value_ints=shape))
            nodes.append(onnx.helper.make_node(operator, names, [target], **settings))
            source = target
        return nodes

    def _is_half(self, site: Site) -> bool:
        graph = self._cut.graph
        past = site.past_key if isinstance(site, AttentionSite) else site.past
        if past in graph.inputs:
            return graph.inputs[past].type.tensor_type.elem_type == FLOAT16
        matrices = (t.elem_type for t in graph.tensors.values() if len(t.shape) > 1)
        return FLOAT16 in matrices

    def _start(
        self,
        what: str,
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[str],
        outputs: Sequence[str],
        constants: Sequence[str],
    ) -> LoadedSegment:
        infos = []
        for name in inputs:
            elem_type = self._context_types.get(name)
            if elem_type is None:
                dtype = self._types.get(name, np.dtype(np.float32))
                elem_type = int(onnx.helper.np_dtype_to_tensor_dtype(dtype))
            kind = onnx.TypeProto(tensor_type=onnx.TypeProto.Tensor(elem_type=elem_type))
            infos.append(onnx.ValueInfoProto(name=name, type=kind))
        graph = onnx.helper.make_graph(
            nodes, what, infos, [onnx.ValueInfoProto(name=name) for name in outputs]
        )
        options = session_options(self._n_threads)
        if not self._packs:
            options.add_session_config_entry("session.disable_prepacking", "1")
        self._add_constants(graph, constants, options)
        source = self._cut.graph
        opsets = [onnx.helper.make_opsetid(domain, v) for domain, v in source.opsets.items()]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=source.ir_version)
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise FormatError(
                f"onnxruntime refuses the {what} of the model: {reason_of(error, 400)}; export "
                "it in another precision (float32, or int4 with symmetric blocks) or with an older "
                "operator set"
            ) from None
        found = {item.name: numpy_type(item) for item in session.get_outputs()}
        self._types |= found
        return LoadedSegment(
            session, {item.name: numpy_type(item) for item in session.get_inputs()}, found
        )

    def _add_constants(
        self, graph: Any, names: Sequence[str], options: onnxruntime.SessionOptions
    ) -> None:
        """Small constants into the graph, the others as views of the mapped file."""
        shared, values = [], []
        for name in names:
            tensor = self._cut.graph.tensors[name]
            proto = graph.initializer.add(name=name, data_type=tensor.elem_type, dims=tensor.shape)
            if len(tensor.data) < MIN_SHARED_BYTES or not tensor.has_dtype:
                proto.raw_data = bytes(tensor.data)
                continue
            proto.data_location = onnx.TensorProto.EXTERNAL
            for key, text in (("location", "shared"), ("length", str(len(tensor.data)))):
                entry = proto.external_data.add()
                entry.key, entry.value = key, text
            shared.append(name)
            values.append(self._shared_value(name))
        if shared:
            options.add_external_initializers(shared, values)

    def _shared_value(self, name: str) -> Any:
        if name not in self._tensors:
            array = self._cut.graph.tensors[name].array()
            self._tensors[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        return self._tensors[name]


def session_options(n_threads: int) -> onnxruntime.SessionOptions:
    """How all segments run."""
    share_arena()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = LOG_FATAL
    for key, value in _SESSION_ENTRIES.items():
        options.add_session_config_entry(key, value)
    return options


@cache
def share_arena() -> None:
    """One pool of working memory for all sessions of the process: they run one at a time."""
    state = onnxruntime.capi._pybind_state
    info = state.OrtMemoryInfo(
        "Cpu", state.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, state.OrtMemType.DEFAULT
    )
    # The embedding program may have registered one.
    with suppress(RuntimeError):
        onnxruntime.create_and_register_allocator(info, onnxruntime.OrtArenaCfg(0, 1, -1, -1))


def _declared_type(graph: OnnxGraph, name: str) -> int:
    info = graph.inputs.get(name)
    elem_type = INT64 if info is None else info.type.tensor_type.elem_type
    if elem_type not in (6, INT64) and name != MASK:
        raise FormatError(f"the input {quote(name)} is of element type {elem_type}, not integer")
    return int(elem_type)


def numpy_type(item: Any) -> np.dtype[Any]:
    """The type of an input or output of a session. Raises FormatError for one NumPy lacks."""
    dtype: np.dtype[Any] | None = _NUMPY_TYPES.get(item.type)
    if dtype is None:
        raise FormatError(
            f"the value {quote(item.name)} is of type {item.type}, which cannot cross between "
            "onnxruntime and the attention; export the model in float or half precision"
        )
    return dtype


def reason_of(error: Exception, limit: int = 300) -> str:
    """What onnxruntime says, in one line of at most ``limit`` characters."""
    return " ".join(str(error).split())[:limit]

"""onnxruntime sessions for the segments of a decoder, and the masks of its attention checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError, UsageError
from ..formats.metadata import quote
from .cut import CONTEXT_INPUTS, MASK, PAST_SHAPE, POSITIONS, TOKENS, Cut, Stage
from .graph import OnnxGraph, describe_node
from .products import ProductGroup, group_products
from .sites import AttentionSite

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

MIN_RUNTIME = (1, 23)
FLOAT, FLOAT16, INT64 = 1, 10, 7
# Smaller constants go into the segment, where onnxruntime sees shapes and axes while it optimises.
MIN_SHARED_BYTES = 1024
LOG_FATAL = 4

_NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(double)": np.dtype(np.float64),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(bool)": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class SegmentSession:
    """A session and the types of what goes in and comes out, by name."""

    session: onnxruntime.InferenceSession
    inputs: Mapping[str, np.dtype[Any]]
    outputs: Mapping[str, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class AttentionValues:
    """Names of the values [1, n, heads * head_dim] of one attention, in float32.

    An empty ``k`` and ``v`` mean that ``q`` holds all three.
    """

    q: str
    k: str
    v: str
    out: str

    @property
    def sources(self) -> list[str]:
        """The values that it reads."""
        return [name for name in (self.q, self.k, self.v) if name]


@dataclass(frozen=True, slots=True)
class StageSession:
    """A stage that can run: a session, if there is anything for it, products, an attention."""

    segment: SegmentSession | None
    products: Sequence[ProductGroup]
    attention: AttentionValues | None


def require_runtime() -> None:
    """Raises UsageError for an onnxruntime that is too old, with the reason."""
    import onnxruntime

    version = onnxruntime.__version__
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < MIN_RUNTIME:
        least = ".".join(map(str, MIN_RUNTIME))
        raise UsageError(
            f"onnxruntime {version} is too old for ONNX models: {least} or newer is needed (up to "
            "1.19 its GroupQueryAttention is wrong for a prompt in pieces, and 1.23 is the oldest "
            f"that is tested); pip install 'onnxruntime>={least}'"
        )


def _own_name(i: int, what: str) -> str:
    """The name of a value that only crosses between layer ``i``'s attention and onnxruntime."""
    return f"edgeh2o/{i}/{what}"


class SegmentFactory:
    """Makes the sessions of one cut, in order: the types of the later follow from the earlier.

    ``heads`` are number and width of the query heads.
    """

    def __init__(self, cut: Cut, n_threads: int, heads: tuple[int, int]) -> None:
        self._cut = cut
        self._n_threads = n_threads
        self._heads = heads
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

    def make(self, stage: Stage) -> StageSession:
        """A stage. Raises FormatError for what onnxruntime refuses."""
        segment = stage.segment
        nodes = list(segment.nodes)
        outputs = list(segment.outputs)
        renamed: dict[str, str] = {}
        attention = None
        if stage.site is not None:
            attention, casts = self._attention_values(stage.site)
            nodes += casts
            own = [name for name in attention.sources if name not in self._products]
            # What nobody but the attention reads is given to it under its own name alone.
            unread = {stage.site.q, stage.site.k, stage.site.v} - self._read
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
        return StageSession(session, groups, attention)

    def make_masks(self) -> SegmentSession | None:
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

    def _attention_values(self, site: AttentionSite) -> tuple[AttentionValues, list[NodeProto]]:
        """Where an attention reads, and the nodes that bring there what is elsewhere."""
        from onnx import helper

        i = self._layers[site.output]
        nodes, names = [], {}
        for source, what in ((site.q, "q"), (site.k, "k"), (site.v, "v")):
            # The attention rotates its inputs in place.
            is_its_own = source in self._products and len(self._cut.graph.consumers(source)) == 1
            if not source or (is_its_own and not site.is_head_major):
                names[what] = source
                continue
            name = names[what] = _own_name(i, what)
            if site.is_head_major:
                nodes.append(
                    helper.make_node("Transpose", [source], [f"{name}/rows"], perm=[0, 2, 1, 3])
                )
                source = f"{name}/rows"
            nodes.append(helper.make_node("Cast", [source], [name], to=FLOAT))
        return AttentionValues(out=_own_name(i, "out"), **names), nodes

    def _attended_nodes(self, output: str) -> list[NodeProto]:
        """From what we compute, [1, n, width] in float32, to what the attention node gave."""
        from onnx import helper

        i = self._layers[output]
        site = self._cut.sites[i]
        steps: list[tuple[str, dict[str, Any]]] = []
        if site.is_head_major:
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
                shape = [0, 0, *self._heads]
                nodes.append(helper.make_node("Constant", [], [names[1]], value_ints=shape))
            nodes.append(helper.make_node(operator, names, [target], **settings))
            source = target
        return nodes

    def _is_half(self, site: AttentionSite) -> bool:
        graph = self._cut.graph
        if site.past_key in graph.inputs:
            return graph.inputs[site.past_key].type.tensor_type.elem_type == FLOAT16
        matrices = (t.elem_type for t in graph.tensors.values() if len(t.shape) > 1)
        return FLOAT16 in matrices

    def _start(
        self,
        what: str,
        nodes: Sequence[NodeProto],
        inputs: Sequence[str],
        outputs: Sequence[str],
        constants: Sequence[str],
    ) -> SegmentSession:
        import onnxruntime
        from onnx import TypeProto, ValueInfoProto, helper

        infos = []
        for name in inputs:
            elem_type = self._context_types.get(name)
            if elem_type is None:
                dtype = self._types.get(name, np.dtype(np.float32))
                elem_type = int(helper.np_dtype_to_tensor_dtype(dtype))
            kind = TypeProto(tensor_type=TypeProto.Tensor(elem_type=elem_type))
            infos.append(ValueInfoProto(name=name, type=kind))
        graph = helper.make_graph(
            nodes, what, infos, [ValueInfoProto(name=name) for name in outputs]
        )
        options = self._options()
        self._add_constants(graph, constants, options)
        model = self._wrap(graph)
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise _runtime_error(self._cut.graph, what, error) from None
        found = {item.name: _dtype_of(item) for item in session.get_outputs()}
        self._types |= found
        return SegmentSession(
            session, {item.name: _dtype_of(item) for item in session.get_inputs()}, found
        )

    def _wrap(self, graph: Any) -> ModelProto:
        from onnx import helper

        source = self._cut.graph
        opsets = [helper.make_opsetid(domain, v) for domain, v in source.opsets.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=source.ir_version)

    def _options(self) -> onnxruntime.SessionOptions:
        import onnxruntime

        share_arena()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._n_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = LOG_FATAL
        # Threads of other segments and of the attention need the cores between two runs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.use_env_allocators", "1")
        return options

    def _add_constants(
        self, graph: Any, names: Sequence[str], options: onnxruntime.SessionOptions
    ) -> None:
        """Small constants into the graph, the others as views of the mapped file."""
        from onnx import TensorProto

        shared, values = [], []
        for name in names:
            tensor = self._cut.graph.tensors[name]
            proto = graph.initializer.add(name=name, data_type=tensor.elem_type, dims=tensor.shape)
            if len(tensor.data) < MIN_SHARED_BYTES or not tensor.has_dtype:
                proto.raw_data = bytes(tensor.data)
                continue
            proto.data_location = TensorProto.EXTERNAL
            for key, text in (("location", "shared"), ("length", str(len(tensor.data)))):
                entry = proto.external_data.add()
                entry.key, entry.value = key, text
            shared.append(name)
            values.append(self._shared_value(name))
        if shared:
            options.add_external_initializers(shared, values)

    def _shared_value(self, name: str) -> Any:
        import onnxruntime

        if name not in self._tensors:
            array = self._cut.graph.tensors[name].array()
            self._tensors[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        return self._tensors[name]


@cache
def share_arena() -> None:
    """One pool of working memory for all sessions of the process: they run one at a time."""
    import onnxruntime
    from onnxruntime.capi import _pybind_state as state

    info = state.OrtMemoryInfo(
        "Cpu", state.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, state.OrtMemType.DEFAULT
    )
    # The embedding program may have registered one.
    with suppress(RuntimeError):
        onnxruntime.create_and_register_allocator(info, onnxruntime.OrtArenaCfg(0, -1, -1, -1))


def _declared_type(graph: OnnxGraph, name: str) -> int:
    info = graph.inputs.get(name)
    elem_type = INT64 if info is None else info.type.tensor_type.elem_type
    if elem_type not in (6, INT64) and name != MASK:
        raise FormatError(f"the input {quote(name)} is of element type {elem_type}, not integer")
    return int(elem_type)


def _dtype_of(item: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] | None = _NUMPY_TYPES.get(item.type)
    if dtype is None:
        raise FormatError(
            f"the value {quote(item.name)} is of type {item.type}, which cannot cross between "
            "onnxruntime and the attention; export the model in float or half precision"
        )
    return dtype


def _runtime_error(graph: OnnxGraph, what: str, error: Exception) -> FormatError:
    reason = " ".join(str(error).split())
    return FormatError(
        f"{graph.path}: onnxruntime refuses the {what} of the model: {reason:.400}; use a newer "
        "onnxruntime, or export the model with an older operator set"
    )


def check_masks(
    cut: Cut, session: SegmentSession | None, context_length: int, past_shape: Sequence[int]
) -> list[AttentionSite]:
    """The sites, with the windows that their masks have.

    What a graph computes for masks, lengths and positions is dropped: the attention is causal and
    knows where it stands. So the graph must compute just that, which is tried out. Raises
    FormatError naming the node if it does not.
    """
    if session is None:
        return list(cut.sites)
    longest = max(16, context_length)
    cases = [(longest - 1, 1), (0, 1), (0, 7), (3, 1), (5, 4)]
    windows: dict[str, int] = {}
    for n_past, n_new in cases:
        feed = context_feed(session, n_past, n_new, past_shape)
        try:
            values = session.session.run(list(session.outputs), feed)
        except Exception as error:
            raise _runtime_error(cut.graph, "masks", error) from None
        found = dict(zip(session.outputs, values, strict=True))
        for site in cut.sites:
            for name, kind in site.masks:
                _check_mask(site, name, kind, found[name], n_past, n_new, windows)
    return [
        replace(site, window=max([site.window, *(windows.get(name, 0) for name, _ in site.masks)]))
        for site in cut.sites
    ]


def context_feed(
    session: SegmentSession, n_past: int, n_new: int, past_shape: Sequence[int]
) -> dict[str, NDArray[Any]]:
    """Values of the inputs that depend on positions only; tokens are all 0."""
    n_kv_heads, head_dim = past_shape
    shape = np.array([1, n_kv_heads, n_past, head_dim], np.int64)
    values: dict[str, NDArray[Any]] = {
        TOKENS: np.zeros((1, n_new), np.int64),
        POSITIONS: np.arange(n_past, n_past + n_new)[None],
        MASK: np.ones((1, n_past + n_new)),
        PAST_SHAPE: shape,
    }
    return {
        name: values[name].astype(dtype)
        for name, dtype in session.inputs.items()
        if name in CONTEXT_INPUTS
    }


def _check_mask(
    site: AttentionSite,
    name: str,
    kind: str,
    value: NDArray[Any],
    n_past: int,
    n_new: int,
    windows: dict[str, int],
) -> None:
    total = n_past + n_new
    if kind == "last position":
        is_right = value.size == 1 and int(value.ravel()[0]) == total - 1
    elif kind == "total length":
        is_right = value.size == 1 and int(value.ravel()[0]) == total
    elif kind == "positions":
        is_right = np.array_equal(value.ravel(), np.arange(n_past, total))
    elif kind == "no padding":
        is_right = bool((value == total).all() if value.size == 1 else (value != 0).all())
    else:
        is_right = _is_causal(value, n_past, n_new, kind, name, windows)
    if not is_right:
        raise FormatError(
            f"{describe_node(site.node)}: its input {quote(name)} is not what a causal decoder "
            f"has for {n_new} tokens after {n_past} ({kind}); this attention is not supported"
        )


def _is_causal(
    value: NDArray[Any], n_past: int, n_new: int, kind: str, name: str, windows: dict[str, int]
) -> bool:
    """Whether a mask, additive or boolean, hides what is to come, or what is past a window."""
    total = n_past + n_new
    if value.ndim < 2 or value.shape[-1] < total or value.shape[-2] not in (1, n_new):
        return False
    rows = value[..., :total]
    if value.dtype == np.bool_:
        visible, hidden = rows, ~rows
    else:
        visible, hidden = rows == 0, rows.astype(np.float64) <= -1e4
    if not np.array_equal(visible, ~hidden):
        return False
    flat = np.broadcast_to(visible, (*visible.shape[:-2], n_new, total)).reshape(-1, n_new, total)
    if not (flat == flat[0]).all():
        return False
    distance = np.arange(n_past, total)[:, None] - np.arange(total)
    if name not in windows:  # the first case: one token at the end of the longest context
        n_visible = int(flat[0, -1].sum())
        windows[name] = 0 if n_visible == total else n_visible
    window = windows[name] or total
    expected = (distance >= 0) & (distance < window)
    if kind == "bias" and flat[0].all():  # the node itself is causal
        return True
    return np.array_equal(flat[0], expected)

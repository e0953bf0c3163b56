"""onnxruntime sessions of pieces of a graph, and where the constants of these are.

A constant that a kernel packs when its session is made is given to that as one: by its place in its
file, which onnxruntime maps; a view of this program's mapping it would copy. What kernels only
read, such as the embedding and the weights of norms, goes in with every call instead, straight from
the mapped file: onnxruntime would copy it. Pieces that then differ in names alone, as those of one
layer and the next do, share a session.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import FormatError
from ..formats.metadata import quote
from ..model_config import ModelConfig
from .cut import MASK, PAST_SHAPE, POSITIONS, TOKENS
from .data import OnnxTensor
from .encoding import encode_model
from .graph import OnnxGraph, describe_nodes
from .messages import Node, Tensor, ValueInfo
from .packages import address_error, onnxruntime

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOAT, FLOAT16, INT64 = 1, 10, 7
_UINT8 = 2
# As ``sessions`` names values that cross between a layer's mixer and onnxruntime.
_OWN_NAME = re.compile(r"['\"]?edgeh2o/(\d+)/[\w/]+['\"]?")
# Smaller constants go into the segment, where onnxruntime sees shapes and axes while it optimises.
MIN_SHARED_BYTES = 1024
# Larger weights of products are not copied twice on their way.
_PACK_FROM_FILE_BYTES = 2**25
LOG_FATAL = 4
# Where onnxruntime opens files by the names in a model, and bytes that it takes for that.
_FOLDER_ENTRY = "session.model_external_initializers_file_folder_path"
_MAX_ENTRY_BYTES = 1000
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
# Where operators read constants in place, and of which types: (types, places among the inputs).
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_SKIP_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_Places: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
_READ_IN_PLACE: dict[str, _Places] = {
    "Gather": ((FLOAT, FLOAT16), (0,)),
    **{name: ((FLOAT,), (1,)) for name in _NORMS},
    **{name: ((FLOAT,), (2,)) for name in _SKIP_NORMS},
}
# Weights of float products, which are packed.
_PRODUCTS: dict[str, _Places] = {name: ((FLOAT,), (1,)) for name in ("FusedMatMul", "MatMul")}
# What is read in place where nothing is packed.
_READ_UNPACKED: dict[str, _Places] = {
    "GatherBlockQuantized": ((FLOAT, _UINT8), (0, 2, 3)),
    **_PRODUCTS,
    "MatMulNBits": ((FLOAT, _UINT8), (1, 2, 3, 5)),
    "Reshape": ((FLOAT, _UINT8), (0,)),
    "Transpose": ((FLOAT,), (0,)),
    **_READ_IN_PLACE,
}


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """A session and the types of what goes in and comes out, by name.

    ``names`` are those that the session has for them, and ``constants`` go in with every call, by
    the session's names. ``held`` must live as long as the session. Segments of one ``kind`` differ
    in names and in weights of products and norms alone: what one gives tells the others' shapes.
    """

    session: onnxruntime.InferenceSession
    inputs: Mapping[str, np.dtype[Any]]
    outputs: Mapping[str, np.dtype[Any]]
    names: Mapping[str, str]
    constants: Mapping[str, OnnxTensor]
    held: Sequence[Any]
    kind: Hashable

    def run(self, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Outputs by name, to try a segment out: the memory of its constants is given back.

        Raises FormatError if onnxruntime cannot compute them.
        """
        own = {self.names[name]: value for name, value in feed.items()}
        own |= {name: tensor.array() for name, tensor in self.constants.items()}
        try:
            values = self.session.run([self.names[name] for name in self.outputs], own)
        except Exception as error:
            raise FormatError(
                f"the model does not run on a few tokens: {reason_of(error)}"
            ) from None
        for tensor in self.constants.values():
            tensor.release()
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


class SessionMaker:
    """Makes the sessions of one graph. Unless it ``packs``, weights are left where they are."""

    def __init__(self, graph: OnnxGraph, n_threads: int, *, packs: bool = True) -> None:
        self._graph = graph
        self._n_threads = n_threads
        self._packs = packs
        self._values: dict[str, Any] = {}  # OrtValues over the mapped weights
        self._made: dict[Hashable, _Made] = {}

    def make(
        self,
        what: str,
        nodes: Sequence[Node],
        inputs: Mapping[str, int],
        outputs: Sequence[str],
        constants: Sequence[str],
    ) -> LoadedSegment:
        """``nodes`` with ``inputs`` of these element types; ``what`` is for messages.

        Raises FormatError for what onnxruntime refuses.
        """
        tensors = [self._graph.tensors[name] for name in constants]
        places = _READ_IN_PLACE if self._packs else _READ_UNPACKED
        read = [tensor for tensor in tensors if _is_used_as(tensor, nodes, places)]
        within = [tensor for tensor in tensors if tensor not in read]
        is_small = all(_goes_into_the_graph(tensor) for tensor in within)
        weights = [tensor for tensor in within if _is_used_as(tensor, nodes, _PRODUCTS)]
        others = [tensor for tensor in within if tensor not in weights]
        kind: Hashable = object()
        if all(_goes_into_the_graph(tensor) for tensor in others):
            kind = _signature(nodes, inputs, [*read, *weights], others, outputs)
        made = self._made.get(kind) if is_small else None
        if made is None:
            made = self._start(what, nodes, inputs, outputs, read, within)
            if is_small:
                self._made[kind] = made
        own = [*inputs, *(tensor.name for tensor in read), *outputs]
        names = dict(zip(own, made.names, strict=True))
        return LoadedSegment(
            made.session,
            {name: made.types[names[name]] for name in inputs if names[name] in made.types},
            {name: made.types[names[name]] for name in outputs},
            names,
            {names[tensor.name]: tensor for tensor in read},
            made.held,
            kind,
        )

    def _start(
        self,
        what: str,
        nodes: Sequence[Node],
        inputs: Mapping[str, int],
        outputs: Sequence[str],
        read: Sequence[OnnxTensor],
        within: Sequence[OnnxTensor],
    ) -> _Made:
        infos = [ValueInfo(name, elem_type) for name, elem_type in inputs.items()]
        infos += [ValueInfo(tensor.name, tensor.elem_type, tensor.shape) for tensor in read]
        options = session_options(self._n_threads)
        if not self._packs:
            options.add_session_config_entry("session.disable_prepacking", "1")
        initializers, held = self._add_constants(nodes, within, options)
        model = encode_model(
            what,
            nodes,
            inputs=infos,
            outputs=outputs,
            initializers=initializers,
            opsets=self._graph.opsets,
            ir_version=self._graph.ir_version,
        )
        try:
            session = onnxruntime.InferenceSession(
                model, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            if (lack := address_error(error, f"the {what} of the model")) is not None:
                raise lack from None
            raise FormatError(
                f"onnxruntime refuses the {what} of the model: {reason_of(error, 400)}; export "
                "it in another precision (float32, or int4 with symmetric blocks) or with an older "
                "operator set"
            ) from None
        self._graph.files.check_places({t.location for t in within if t.offset is not None})
        items = (*session.get_inputs(), *session.get_outputs())
        names = [*inputs, *(tensor.name for tensor in read), *outputs]
        return _Made(session, names, {item.name: numpy_type(item) for item in items}, held)

    def _add_constants(
        self,
        nodes: Sequence[Node],
        tensors: Sequence[OnnxTensor],
        options: onnxruntime.SessionOptions,
    ) -> tuple[list[Tensor], list[Any]]:
        """Small constants for the graph, the others where they are: in a file or in memory."""
        initializers = []
        shared: dict[str, Any] = {}
        folder = str(self._graph.path.parent)
        opens_files = len(folder.encode()) <= _MAX_ENTRY_BYTES
        if opens_files:
            options.add_session_config_entry(_FOLDER_ENTRY, folder)
        for tensor in tensors:
            name, elem_type, shape = tensor.name, tensor.elem_type, tensor.shape
            if _goes_into_the_graph(tensor):
                initializers.append(Tensor(name, elem_type, shape, bytes(tensor.data)))
                continue
            is_file = opens_files and tensor.offset is not None
            place = {"location": tensor.location if is_file else "shared"}
            place |= {"offset": str(tensor.offset if is_file else 0)}
            place |= {"length": str(len(tensor.data))}
            initializers.append(Tensor(name, elem_type, shape, external=tuple(place.items())))
            if is_file:
                continue
            value = shared[tensor.name] = self._shared_value(tensor)
            # onnxruntime packs it from where it is, else from a second copy, which is quicker.
            # No optimisation may change it: the one that is given here would take its place.
            if len(tensor.data) >= _PACK_FROM_FILE_BYTES and _is_used_as(tensor, nodes, _PRODUCTS):
                options.add_initializer(tensor.name, value)
        if shared:
            options.add_external_initializers(list(shared), list(shared.values()))
        return initializers, list(shared.values())

    def _shared_value(self, tensor: OnnxTensor) -> Any:
        if tensor.name not in self._values:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(tensor.array())
            self._values[tensor.name] = value
        return self._values[tensor.name]


@dataclass(frozen=True, slots=True)
class _Made:
    """A session, the names of its inputs and outputs in order, and their types."""

    session: onnxruntime.InferenceSession
    names: Sequence[str]
    types: Mapping[str, np.dtype[Any]]
    held: Sequence[Any]


def _goes_into_the_graph(tensor: OnnxTensor) -> bool:
    return len(tensor.data) < MIN_SHARED_BYTES or not tensor.has_dtype


def _is_used_as(tensor: OnnxTensor, nodes: Sequence[Node], known: Mapping[str, _Places]) -> bool:
    """Whether a constant is large, and all that ``nodes`` do with it is ``known``."""
    if _goes_into_the_graph(tensor):
        return False
    for node in nodes:
        for place, name in enumerate(node.input):
            if name == tensor.name:
                types, places = known.get(node.op_type, ((), ()))
                if tensor.elem_type not in types or place not in places:
                    return False
    return True


def _signature(
    nodes: Sequence[Node],
    inputs: Mapping[str, int],
    read: Sequence[OnnxTensor],
    within: Sequence[OnnxTensor],
    outputs: Sequence[str],
) -> Hashable:
    """Equal for segments that differ in the names of values, and in what ``read`` holds, alone."""
    names: dict[str, Hashable] = {name: ("input", i) for i, name in enumerate(inputs)}
    names |= {tensor.name: ("read", i) for i, tensor in enumerate(read)}
    names |= {t.name: (t.elem_type, t.shape, bytes(t.data)) for t in within}
    types = (tuple(inputs.values()), tuple((t.elem_type, t.shape) for t in read))
    steps = describe_nodes(nodes, names)
    return types, steps, tuple(names[name] for name in outputs)


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
    """What onnxruntime says, in one line of at most ``limit`` characters, in whole words.

    Values that only we know by their names are described.
    """
    text = _OWN_NAME.sub(r"what layer \1 computes", " ".join(str(error).split()))
    if len(text) <= limit:
        return text
    return text[: limit - 3].rpartition(" ")[0].rstrip(" ,;:") + " ..."

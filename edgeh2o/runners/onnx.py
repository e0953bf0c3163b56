"""ONNX models: onnxruntime runs what lies between the attention, edgeh2o the attention."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..config import ModelConfig
from ..errors import FormatError, ResourceError, UsageError
from ..formats.metadata import quote
from ..formats.onnx_folder import OnnxFolder, find_onnx_model
from ..formats.onnx_graph import OnnxGraph, require_onnx
from ..tokenizer.tokenizer_json import JsonTokenizer, TokenizerSettings
from .base import OnLayer, RunnerState, SessionShape
from .onnx_attention import AttentionSite
from .onnx_checks import check_blocks
from .onnx_cut import LOGITS, MASK, PAST_SHAPE, POSITIONS, TOKENS, Cut, cut_decoder
from .onnx_plan import ValueShape, ValueStore, probe_segments
from .onnx_sessions import (
    SegmentFactory,
    SegmentSession,
    attended_name,
    check_masks,
    key_name,
    query_name,
    require_runtime,
    value_name,
)

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import NDArray

    from ..attention.base import SparseAttentionConfig
    from ..tokenizer import Tokenizer

OnBytes = Callable[[int, int], None]

# Rows that pass a segment at a time: what it computes in between stays in the caches.
BLOCK_ROWS = 256
DEFAULT_CONTEXT = 2048
SAMPLE_BYTES = 4096
FINGERPRINT_PROPERTY = "edgeh2o.fingerprint"


class OnnxModelFile:
    """A model folder whose graph was cut and found good; no session of onnxruntime yet.

    Raises FormatError for a file that cannot be run, UsageError if onnx or onnxruntime are missing
    or too old, ResourceError for what cannot be read.
    """

    def __init__(self, path: Path) -> None:
        require_onnx()
        require_runtime()
        self.path = path
        self._folder = find_onnx_model(path)
        self._graph = OnnxGraph(self._folder.model_path)
        try:
            self._cut = cut_decoder(self._graph)
            check_blocks(self._graph)
            self.config = _read_config(self._folder, self._graph, self._cut)
            self.tokenizer = _read_tokenizer(self._folder, self.config.vocab_size)
        except FormatError as error:
            raise FormatError(f"{self._folder.model_path}: {error}") from None
        self.n_weight_bytes = self._graph.n_weight_bytes

    def __enter__(self) -> OnnxModelFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass  # the mapped files close with the last array over them

    @property
    def chat_template(self) -> object:
        """As in the files, unchecked."""
        return self._folder.chat_template

    def describe(self) -> dict[str, Any]:
        """What is in the files, for people."""
        graph, config = self._graph, self.config
        operators = Counter(node.op_type for node in graph.nodes)
        return {
            "file": str(self._folder.model_path),
            "bytes": graph.n_file_bytes,
            "weights": {"tensors": len(graph.tensors), "bytes": graph.n_weight_bytes},
            "architecture": config.architecture,
            "layers": config.n_layers,
            "query_heads": config.n_heads,
            "kv_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            "vocabulary": config.vocab_size,
            "context_length": config.context_length,
            "attention_operator": self._cut.sites[0].node.op_type,
            "rotary_by_attention": self._cut.sites[0].rotary is not None,
            "operators": dict(operators.most_common()),
        }

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        """Bytes by purpose that a session of ``shape`` would allocate; nothing is allocated."""
        return _estimate_session_bytes(self.config, self._cut.sites, attention, shape)

    def load(self, *, check_tensors: bool = False, on_bytes: OnBytes | None = None) -> OnnxModel:
        """Makes the sessions. ``on_bytes(done, total)`` counts bytes of weights, by segments."""
        if check_tensors:
            _check_tensors(self._graph)
        try:
            return OnnxModel(self._folder, self._cut, self.config, self.tokenizer, on_bytes)
        except FormatError as error:
            raise FormatError(f"{self._folder.model_path}: {error}") from None


class OnnxModel:
    """The sessions of one model, and the tokenizer of the same folder."""

    def __init__(
        self,
        folder: OnnxFolder,
        cut: Cut,
        config: ModelConfig,
        tokenizer: Tokenizer,
        on_bytes: OnBytes | None,
    ) -> None:
        graph = cut.graph
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = folder.chat_template
        self.fingerprint = _hash_model(graph)
        self.weight_bytes = graph.n_weight_bytes
        self.n_threads = _core.num_threads()
        heads = (config.n_heads, config.head_dim)
        past_shape = (config.n_kv_heads, config.head_dim)
        factory = SegmentFactory(cut, self.n_threads)
        self.sites: Sequence[AttentionSite] = check_masks(
            cut, factory.make_masks(), config.context_length, past_shape
        )
        self.sessions: list[SegmentSession] = []
        for level in range(len(cut.segments)):
            self.sessions.append(factory.make(level, heads))
            if on_bytes is not None:
                on_bytes(self.weight_bytes * (level + 1) // len(cut.segments), self.weight_bytes)
        width = config.n_heads * config.head_dim
        operators = {node.op_type for node in graph.nodes}
        self.shapes = probe_segments(self.sessions, width, past_shape, operators)
        _check_shapes(self.shapes, self.sites, config)
        self.rotary = [_read_rotary(graph, site, config) for site in self.sites]
        self.attention_args = _attention_args(config, self.sites)

    @property
    def context_length(self) -> int:
        return self.config.context_length

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        return _estimate_session_bytes(self.config, self.sites, attention, shape)

    def start_session(self, attention: SparseAttentionConfig, shape: SessionShape) -> OnnxRunner:
        limits = [len(tables[0]) for tables in self.rotary if tables]
        limits += [site.max_context for site in self.sites if site.max_context is not None]
        if shape.max_context > min(limits, default=2**31):
            raise UsageError(
                f"a context of {shape.max_context} is longer than the {min(limits)} positions for "
                f"which this graph has rotary tables or masks; use -c {min(limits)} or less"
            )
        policy = attention.make_policy(self.config)
        try:
            return OnnxRunner(self, policy, shape)
        except MemoryError:
            raise ResourceError(
                f"the session for {shape.max_context} positions could not be allocated; "
                "use a smaller context (--ctx-size)"
            ) from None


class OnnxRunner:
    """Segments and attention in turn, as a ``Runner``."""

    def __init__(self, model: OnnxModel, policy: _core.SparsePolicy, shape: SessionShape) -> None:
        self._model = model
        self.policy = policy
        self._shape = shape
        self._attention = _core.ChunkedAttention(
            policy,
            **model.attention_args,
            chunk_size=shape.chunk_size,
            batch_size=shape.batch_size,
            max_context=shape.max_context,
            cache_type=shape.cache_type,
        )
        self._attention.reset()
        self._sizes = _core.ChunkedAttention.estimate_bytes(
            policy,
            **model.attention_args,
            chunk_size=shape.chunk_size,
            batch_size=shape.batch_size,
            max_context=shape.max_context,
            cache_type=shape.cache_type,
        )
        self._store = ValueStore(model.sessions, model.shapes, shape.batch_size)
        self._context = _Context(model.sessions, shape, model.config)
        self._one_row: dict[int, onnxruntime.IOBinding] = {}
        self._views: dict[int, list[_AttentionViews]] = {}
        self._token_ids: list[int] = []
        self._n_rows = 0  # of the latest prefill, while the store holds them
        self._is_broken = False
        self.prompt_logits: NDArray[np.float32] | None = None

    @property
    def position(self) -> int:
        return 0 if self._is_broken else self._attention.position(0)

    @property
    def token_ids(self) -> Sequence[int]:
        del self._token_ids[self.position :]
        return self._token_ids

    @property
    def prefill_end(self) -> int:
        return self._attention.prefill_end

    @property
    def max_context(self) -> int:
        return self._shape.max_context

    @property
    def batch_size(self) -> int:
        return self._shape.batch_size

    @property
    def chunk_size(self) -> int:
        return self._shape.chunk_size

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def pairs_computed(self) -> int:
        return self._attention.pairs_computed

    @property
    def pairs_dense(self) -> int:
        return self._attention.pairs_dense

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {**self._sizes, "activations": self._store.n_bytes}

    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        stays_open: bool = False,
        on_layer: OnLayer | None = None,
    ) -> NDArray[np.float32] | None:
        self._begin(tokens, self._shape.batch_size)
        self.prompt_logits = None
        n_tokens, first = len(tokens), self.position
        self._is_broken = True
        self._context.set_tokens(tokens, first)
        is_closed = is_last and not stays_open
        views = self._attention_views(n_tokens)
        n_layers = len(views)
        for layer, (site, view) in enumerate(zip(self._model.sites, views, strict=True)):
            for row in range(0, n_tokens, BLOCK_ROWS):
                self._run_segment(layer, row, min(BLOCK_ROWS, n_tokens - row), first)
            self._attention.run(
                layer,
                view.q,
                view.k,
                view.v,
                window=site.window,
                is_last=is_closed,
                out=view.out,
                **self._rotary(layer, first, n_tokens),
            )
            # Else they go on spinning for a while, in the way of onnxruntime's.
            _core.release_threads()
            if on_layer is not None:
                on_layer(layer + 1, n_layers)
        self._is_broken = False
        self._token_ids += tokens.tolist()
        self._n_rows = n_tokens
        if not is_last:
            return None
        logits: NDArray[np.float32] = self.row_logits(n_tokens - 1, 1)[0]
        if stays_open:
            self.prompt_logits = logits
        return logits

    def row_logits(self, first: int, n_rows: int) -> NDArray[np.float32]:
        if n_rows <= 0 or first < 0 or first + n_rows > self._n_rows:
            raise ValueError(
                f"rows {first} to {first} + {n_rows} are not among the {self._n_rows} of the "
                "latest prefill call"
            )
        start = self.position - self._n_rows
        shape = self._model.shapes[LOGITS]
        step = n_rows if shape.is_per_token else 1
        logits = np.empty((n_rows, self.vocab_size), shape.dtype)
        level = len(self._model.sessions) - 1
        for row in range(0, n_rows, step):
            self._run_segment(level, first + row, step, start, logits[row : row + step])
        return logits.astype(np.float32, copy=False)

    def decode(self, token: int) -> NDArray[np.float32]:
        tokens = np.array([token], np.int32)
        self._begin(tokens, 1)
        first = self.position
        self._is_broken = True
        self._n_rows = 0
        self._context.set_tokens(tokens, first)
        level = 0
        for site, view in zip(self._model.sites, self._attention_views(1), strict=True):
            self._run_one_row(level, first)
            self._attention.decode(
                level,
                view.q,
                view.k,
                view.v,
                window=site.window,
                out=view.out,
                **self._rotary(level, first, 1),
            )
            level += 1
        logits = np.empty((1, self.vocab_size), self._model.shapes[LOGITS].dtype)
        self._run_segment(level, 0, 1, first, logits)
        self._is_broken = False
        self._token_ids.append(token)
        result: NDArray[np.float32] = logits[0].astype(np.float32, copy=False)
        return result

    def reset(self) -> None:
        self._attention.reset()
        self._token_ids.clear()
        self._n_rows = 0
        self._is_broken = False
        self.prompt_logits = None

    def rewind(self, position: int) -> None:
        self._require_whole()
        self._attention.rewind(position)
        self._n_rows = 0

    def export_state(self) -> RunnerState:
        self._require_whole()
        try:
            core = self._attention.save_state()
        except ValueError as error:
            raise UsageError(f"the session cannot be saved: {error}") from None
        return RunnerState(tuple(self.token_ids), core, self.prompt_logits)

    def import_state(self, state: RunnerState) -> None:
        self.reset()
        try:
            self._attention.load_state(state.core)
            if self.position != len(state.token_ids):
                raise ValueError(f"it is of {self.position} tokens, not {len(state.token_ids)}")
        except ValueError as error:
            self.reset()
            raise FormatError(f"the saved state does not fit: {error}") from None
        self._token_ids = list(state.token_ids)
        self.prompt_logits = state.prompt_logits

    def cached_rows(self) -> Iterator[NDArray[np.uint8]]:
        for layer in range(len(self._model.sites)):
            yield from self._attention.cached_rows(layer)

    def _require_whole(self) -> None:
        if self._is_broken:
            raise ValueError("the last call was interrupted: reset() the session first")

    def _begin(self, tokens: NDArray[np.int32], most: int) -> None:
        """Refuses a call that cannot be made. Raises ValueError."""
        self._require_whole()
        n_tokens = len(tokens)
        if tokens.ndim != 1 or not 1 <= n_tokens <= most:
            raise ValueError(f"a call takes 1 to {most} tokens, got {n_tokens}")
        if n_tokens > self.max_context - self.position:
            raise ValueError(
                f"position {self.position} plus {n_tokens} tokens exceeds the context of "
                f"{self.max_context}"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise ValueError(f"a token is outside the vocabulary of {self.vocab_size}")
        del self._token_ids[self.position :]

    def _rotary(self, layer: int, first: int, n_tokens: int) -> dict[str, Any]:
        tables, rotary = self._model.rotary[layer], self._model.sites[layer].rotary
        if tables is None or rotary is None:
            return {}
        end = first + n_tokens
        return {
            "rotary": (tables[0][first:end], tables[1][first:end]),
            "is_interleaved": rotary.is_interleaved,
        }

    def _attention_views(self, n_rows: int) -> list[_AttentionViews]:
        """The arrays of every layer's attention; those of one row and of the latest length stay."""
        if n_rows not in self._views:
            self._views = {key: value for key, value in self._views.items() if key == 1}
            config = self._model.config
            self._views[n_rows] = [
                _AttentionViews(self._store, i, site, config, n_rows)
                for i, site in enumerate(self._model.sites)
            ]
        return self._views[n_rows]

    def _run_one_row(self, level: int, n_past: int) -> None:
        """As ``_run_segment`` of one row, bound once."""
        binding = self._one_row.get(level)
        self._context.set_past(n_past)
        if binding is None:
            binding = self._bind(level, 0, 1, n_past, None)
            if MASK not in self._model.sessions[level].inputs:  # that one grows
                self._one_row[level] = binding
        self._run(level, binding)

    def _run_segment(
        self,
        level: int,
        first_row: int,
        n_rows: int,
        n_past: int,
        logits: NDArray[Any] | None = None,
    ) -> None:
        """Runs a segment on rows of the call whose first token is at position ``n_past``."""
        self._context.set_past(n_past + first_row)
        self._run(level, self._bind(level, first_row, n_rows, n_past, logits))

    def _run(self, level: int, binding: onnxruntime.IOBinding) -> None:
        try:
            self._model.sessions[level].session.run_with_iobinding(binding)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ResourceError(
                f"onnxruntime failed in segment {level} of the model: {reason:.300}; if memory is "
                "short, use a smaller context or batch (-c, -b)"
            ) from None

    def _bind(
        self,
        level: int,
        first_row: int,
        n_rows: int,
        n_past: int,
        logits: NDArray[Any] | None,
    ) -> onnxruntime.IOBinding:
        session, store = self._model.sessions[level], self._store
        binding = session.session.io_binding()
        for name, dtype in session.inputs.items():
            if name in self._context.names:
                dims, address = self._context.place(name, first_row, n_rows, n_past)
            else:
                dims, address = store.shape(name).of(n_rows), store.address(name, first_row)
            binding.bind_input(name, "cpu", 0, dtype, dims, address)
        for name, dtype in session.outputs.items():
            shape = store.shape(name)
            if name == LOGITS:
                assert logits is not None, "only the last segment has logits"
                address = int(logits.ctypes.data)
            else:
                address = store.address(name, first_row)
            binding.bind_output(name, "cpu", 0, dtype, shape.of(n_rows), address)
        return binding


class _AttentionViews:
    """Queries, keys, values and output of one layer, [n, heads, head_dim] each."""

    __slots__ = ("k", "out", "q", "v")

    def __init__(
        self, store: ValueStore, i: int, site: AttentionSite, config: ModelConfig, n_rows: int
    ) -> None:
        def heads(name: str) -> NDArray[np.float32]:
            return store.rows(name, n_rows).reshape(n_rows, -1, config.head_dim)

        if site.is_packed:
            end_q, end_k = config.n_heads, config.n_heads + config.n_kv_heads
            fused = heads(query_name(i))
            self.q, self.k, self.v = fused[:, :end_q], fused[:, end_q:end_k], fused[:, end_k:]
        else:
            self.q, self.k, self.v = (
                heads(name) for name in (query_name(i), key_name(i), value_name(i))
            )
        self.out = heads(attended_name(i))


class _Context:
    """The inputs that depend on tokens and positions only, in memory that stays in place."""

    names = (TOKENS, POSITIONS, MASK, PAST_SHAPE)

    def __init__(
        self, sessions: Sequence[SegmentSession], shape: SessionShape, config: ModelConfig
    ) -> None:
        types: dict[str, np.dtype[Any]] = {}
        for session in sessions:
            types |= {name: session.inputs[name] for name in self.names if name in session.inputs}
        self._values = {name: np.zeros(shape.batch_size, dtype) for name, dtype in types.items()}
        if MASK in types:
            self._values[MASK] = np.ones(shape.max_context, types[MASK])
        if PAST_SHAPE in types:
            self._values[PAST_SHAPE] = np.array(
                [1, config.n_kv_heads, 0, config.head_dim], np.int64
            )

    def set_tokens(self, tokens: NDArray[np.int32], first: int) -> None:
        n_tokens = len(tokens)
        if TOKENS in self._values:
            self._values[TOKENS][:n_tokens] = tokens
        if POSITIONS in self._values:
            self._values[POSITIONS][:n_tokens] = np.arange(first, first + n_tokens)

    def set_past(self, n_past: int) -> None:
        if PAST_SHAPE in self._values:
            self._values[PAST_SHAPE][2] = n_past

    def place(self, name: str, first_row: int, n_rows: int, n_past: int) -> tuple[list[int], int]:
        """Dimensions and address of an input for some rows of a call."""
        value = self._values[name]
        address = int(value.ctypes.data)
        if name == MASK:
            return [1, n_past + first_row + n_rows], address
        if name == PAST_SHAPE:
            return [4], address
        return [1, n_rows], address + first_row * value.itemsize


def _read_config(folder: OnnxFolder, graph: OnnxGraph, cut: Cut) -> ModelConfig:
    """Sizes from the graph, checked against the configuration. Raises FormatError."""
    sites = cut.sites
    found = {"n_layers": len(sites), **_head_sizes(graph, sites), **_vocab_size(graph)}
    sizes = {**folder.sizes, **found}
    for name, value in found.items():
        if folder.sizes.get(name, value) != value:
            raise FormatError(
                f"{folder.config_name} says {name} = {folder.sizes[name]}, the graph has {value}; "
                "the files belong to different models"
            )
    if "head_dim" not in sizes and {"model_dim", "n_heads"} <= sizes.keys():
        sizes["head_dim"] = sizes["model_dim"] // sizes["n_heads"]
    sizes.setdefault("n_kv_heads", sizes.get("n_heads", 0))
    for name in ("n_heads", "n_kv_heads", "head_dim", "vocab_size"):
        if sizes.get(name, 0) <= 0:
            raise FormatError(
                f"neither the graph nor {folder.config_name} says how large {name} is; "
                "put config.json or genai_config.json of the model beside it"
            )
    if sizes["n_heads"] % sizes["n_kv_heads"]:
        raise FormatError(
            f"{sizes['n_heads']} query heads cannot share {sizes['n_kv_heads']} KV heads"
        )
    tables = [
        tensor.shape[0]
        for site in sites
        if site.rotary is not None and (tensor := graph.constant(site.rotary.cos)) is not None
    ]
    context = sizes.get("context_length", min(tables, default=DEFAULT_CONTEXT))
    tables += [site.max_context for site in sites if site.max_context is not None]
    own_print = graph.properties.get(FINGERPRINT_PROPERTY, "")
    is_print = re.fullmatch(r"[0-9a-f]{32}", own_print) is not None
    scale = sites[0].scale or sizes["head_dim"] ** -0.5
    return ModelConfig(
        architecture=folder.architecture,
        n_layers=len(sites),
        model_dim=sizes.get("model_dim", sizes["n_heads"] * sizes["head_dim"]),
        n_heads=sizes["n_heads"],
        n_kv_heads=sizes["n_kv_heads"],
        head_dim=sizes["head_dim"],
        rotary_dim=0,
        ffn_dim=0,
        vocab_size=sizes["vocab_size"],
        context_length=min([context, *tables]),
        norm_eps=0.0,
        rope_inv_freq=(),
        attention_scale=scale,
        attention_soft_cap=sites[0].soft_cap,
        fingerprint=own_print if is_print else _hash_model(graph),
    )


def _head_sizes(graph: OnnxGraph, sites: Sequence[AttentionSite]) -> dict[str, int]:
    """Sizes that the graph declares. Raises FormatError if layers differ."""
    sizes: dict[str, int] = {}
    for site in sites:
        own: dict[str, int] = {}
        if site.n_heads is not None:
            own["n_heads"] = site.n_heads
        if site.n_kv_heads is not None:
            own["n_kv_heads"] = site.n_kv_heads
        past = graph.inputs.get(site.past_key)
        dims = [] if past is None else [dim.dim_value for dim in past.type.tensor_type.shape.dim]
        if len(dims) == 4:
            own |= {name: dims[i] for name, i in (("n_kv_heads", 1), ("head_dim", 3)) if dims[i]}
            if site.n_kv_heads is not None and own["n_kv_heads"] != site.n_kv_heads:
                raise FormatError(
                    f"the cache {quote(site.past_key)} has {dims[1]} KV heads, its attention "
                    f"{site.n_kv_heads}"
                )
        for name, value in own.items():
            if sizes.setdefault(name, value) != value:
                raise FormatError(
                    f"the layers differ in {name} ({sizes[name]} and {value}); such models are "
                    "not supported"
                )
    same = {(site.scale, site.soft_cap) for site in sites}
    if len(same) > 1:
        raise FormatError(f"the layers differ in scale or soft cap: {sorted(map(str, same))}")
    return sizes


def _vocab_size(graph: OnnxGraph) -> dict[str, int]:
    dims = graph.output_dims(LOGITS)
    return {"vocab_size": dims[-1]} if dims and dims[-1] > 0 else {}


def _read_tokenizer(folder: OnnxFolder, vocab_size: int) -> Tokenizer:
    if folder.tokenizer_json is None:
        raise FormatError(
            "there is no tokenizer.json beside the model; fetch it from where the model came from"
        )
    settings = TokenizerSettings(
        vocab_size=vocab_size, bos=folder.bos, eos=folder.eos, more_eos=folder.more_eos
    )
    return JsonTokenizer(folder.tokenizer_json, settings)


def _attention_args(config: ModelConfig, sites: Sequence[AttentionSite]) -> dict[str, Any]:
    return {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "n_layers": len(sites),
        "scale": config.attention_scale,
        "soft_cap": config.attention_soft_cap,
    }


def _estimate_session_bytes(
    config: ModelConfig,
    sites: Sequence[AttentionSite],
    attention: SparseAttentionConfig,
    shape: SessionShape,
) -> Mapping[str, int]:
    try:
        parts = _core.ChunkedAttention.estimate_bytes(
            attention.make_policy(config),
            **_attention_args(config, sites),
            chunk_size=shape.chunk_size,
            batch_size=shape.batch_size,
            max_context=shape.max_context,
            cache_type=shape.cache_type,
        )
    except ValueError as error:
        raise UsageError(f"the model cannot be run with these options: {error}") from None
    # Two residual streams, queries, keys, values and output of a layer.
    row = 2 * config.model_dim + 2 * (config.n_heads + config.n_kv_heads) * config.head_dim
    return {**parts, "activations": 4 * row * shape.batch_size}


def _check_shapes(
    shapes: Mapping[str, ValueShape], sites: Sequence[AttentionSite], config: ModelConfig
) -> None:
    """What the segments give must be what the attention takes. Raises FormatError."""
    kv_width = config.n_kv_heads * config.head_dim
    q_width = config.n_heads * config.head_dim
    for i, site in enumerate(sites):
        names = (
            {query_name(i): q_width + 2 * kv_width}
            if site.is_packed
            else {query_name(i): q_width, key_name(i): kv_width, value_name(i): kv_width}
        )
        for name, width in names.items():
            shape = shapes[name]
            if not shape.is_per_token or shape.row_bytes != 4 * width:
                raise FormatError(
                    f"layer {i} gives {shape.row_bytes // 4} numbers per token for its "
                    f"{name[-1]}, its heads take {width}; the graph is inconsistent"
                )
    dims = shapes[LOGITS].dims
    if dims[-1] != config.vocab_size:
        raise FormatError(
            f"the model gives {dims[-1]} logits, its vocabulary has {config.vocab_size}"
        )


def _read_rotary(
    graph: OnnxGraph, site: AttentionSite, config: ModelConfig
) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    if site.rotary is None:
        return None
    tables = []
    for name in (site.rotary.cos, site.rotary.sin):
        tensor = graph.constant(name)
        if tensor is None:
            raise FormatError(f"the rotary table {quote(name)} is no constant of the model")
        tables.append(tensor.array().astype(np.float32, copy=False))
    cos, sin = tables
    if cos.ndim != 2 or cos.shape != sin.shape or not 1 <= cos.shape[1] <= config.head_dim // 2:
        raise FormatError(
            f"the rotary tables {quote(site.rotary.cos)} and {quote(site.rotary.sin)} have shapes "
            f"{list(cos.shape)} and {list(sin.shape)}, the heads {config.head_dim} dimensions"
        )
    return cos, sin


def _check_tensors(graph: OnnxGraph) -> None:
    for tensor in graph.tensors.values():
        if tensor.elem_type in (1, 10, 11) and not np.isfinite(tensor.array()).all():
            raise FormatError(
                f"{graph.path}: constant {quote(tensor.name)} has a NaN or infinite value; the "
                "file is damaged or was converted wrongly, fetch it again"
            )


def _hash_model(graph: OnnxGraph) -> str:
    """Hexadecimal digest of the nodes, and of every constant's shape and ends."""
    digest = blake2b(digest_size=16)
    for node in graph.nodes:
        digest.update(node.SerializeToString(deterministic=True))
    for name, tensor in sorted(graph.tensors.items()):
        digest.update(f"{name!a}:{tensor.elem_type}:{tensor.shape}\n".encode())
        digest.update(tensor.data[:SAMPLE_BYTES])
        digest.update(tensor.data[-SAMPLE_BYTES:])
    return digest.hexdigest()

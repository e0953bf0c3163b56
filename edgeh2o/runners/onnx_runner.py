"""Segments and attention in turn: one prompt of an ONNX model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..config import ModelConfig
from ..errors import FormatError, ResourceError, UsageError
from .base import OnLayer, RunnerBase, RunnerState, SessionShape
from .onnx_attention import AttentionSite
from .onnx_cut import LOGITS, MASK, PAST_SHAPE, POSITIONS, TOKENS
from .onnx_plan import ValueStore
from .onnx_sessions import (
    SegmentSession,
    attended_name,
    key_name,
    query_name,
    value_name,
)

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import NDArray

    from .onnx import OnnxModel


# Rows that pass a segment at a time: what it computes in between stays in the caches.
BLOCK_ROWS = 256


class OnnxRunner(RunnerBase):
    """Segments and attention in turn, as a ``Runner``."""

    def __init__(self, model: OnnxModel, policy: _core.SparsePolicy, shape: SessionShape) -> None:
        self._model = model
        super().__init__(policy, shape, model.config.vocab_size)
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
        self._n_rows = 0  # of the latest prefill, while the store holds them
        self._is_broken = False

    @property
    def position(self) -> int:
        return 0 if self._is_broken else self._attention.position(0)

    @property
    def prefill_end(self) -> int:
        return self._attention.prefill_end

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

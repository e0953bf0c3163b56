"""The stages of an ONNX model in turn: one prompt, and what is decoded after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import ResourceError
from ..model_config import ModelConfig
from ..runners.base import OnLayer, SessionShape
from ..runners.counted import CountedRunner
from .config import attention_args
from .cut import CONTEXT_INPUTS, LOGITS, MASK, PAST_SHAPE, POSITIONS, TOKENS
from .plan import LoadedDecoder, ProductRunner, ValueStore, find_spans
from .segment_sessions import LoadedSegment, reason_of
from .sessions import AttentionValues, ConvolutionValues, LoadedStage
from .sites import AttentionSite

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import NDArray


# Tokens that pass the stages up to an attention at a time: what they compute stays in the caches.
BLOCK_TOKENS = 256


class OnnxRunner(CountedRunner):
    """Stages in turn, as a ``Runner``."""

    max_decode_tokens = 1  # onnxruntime's sums depend on the number of rows

    def __init__(
        self, decoder: LoadedDecoder, policy: _core.SparsePolicy, shape: SessionShape
    ) -> None:
        self._decoder = decoder
        self._shape = shape
        self.policy = policy
        self.vocab_size = decoder.config.vocab_size
        self.prompt_logits: NDArray[np.float32] | None = None
        self._token_ids: list[int] = []
        sizes = attention_args(decoder.config, shape)
        self._attention = self._counted = _core.ChunkedAttention(policy, **sizes)
        self._sizes = _core.ChunkedAttention.estimate_bytes(policy, **sizes)
        self._store = ValueStore(decoder, shape.batch_size, BLOCK_TOKENS)
        self._products = ProductRunner(decoder, self._store, BLOCK_TOKENS, shape.threads)
        self._context = _Context(decoder.stages, shape, decoder.config)
        self._spans = find_spans(decoder.stages)
        mixing = [i for i, stage in enumerate(decoder.stages) if stage.mixer is not None]
        self._layers = {stage: layer for layer, stage in enumerate(mixing)}
        self._one_token: dict[int, onnxruntime.IOBinding] = {}
        self._views: dict[int, dict[int, dict[str, Any]]] = {}
        self._n_tokens = 0  # of the latest prefill, while the store holds them

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
    def position(self) -> int:
        return self._attention.n_tokens

    @property
    def token_ids(self) -> Sequence[int]:
        del self._token_ids[self.position :]
        return self._token_ids

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        activations = self._store.n_bytes + self._products.n_bytes
        return {**self._sizes, "activations": activations}

    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        stays_open: bool = False,
        on_layer: OnLayer | None = None,
        on_attention: Callable[..., None] | None = None,
    ) -> NDArray[np.float32] | None:
        self._begin(tokens, self._shape.batch_size)
        self.prompt_logits = None
        n_tokens, first = len(tokens), self.position
        self._attention.begin_call()
        self._context.set_tokens(tokens, first)
        views = self._attention_views(n_tokens)
        for span, stages in enumerate(self._spans[:-1]):
            for start in range(0, n_tokens, BLOCK_TOKENS):
                self._run_span(span, start, min(BLOCK_TOKENS, n_tokens - start), first)
            layer = self._layers[stages[-1]]
            view = views.get(layer)
            if view is not None:
                self._attention.run(
                    layer,
                    **view,
                    is_last=is_last,
                    stays_open=stays_open,
                    **self._settings(layer, first, n_tokens),
                )
            # Else they go on spinning for a while, in the way of onnxruntime's.
            _core.release_threads()
            if on_attention is not None and view is not None:
                rows = [view[name].reshape(n_tokens, -1) for name in ("q", "k", "v", "out")]
                stream = self._store.copy_rows(self._decoder.residuals[layer], n_tokens)
                on_attention(layer, stream, *rows)
            if on_layer is not None:
                on_layer(layer + 1, len(self._layers))
        self._attention.end_call()
        self._token_ids += tokens.tolist()
        self._n_tokens = n_tokens
        if not is_last:
            return None
        logits: NDArray[np.float32] = self.row_logits(n_tokens - 1, 1)[0]
        if stays_open:
            self.prompt_logits = logits
            # An answer moves a recurrent state on: the next prompt may have to go back to here.
            if self._decoder.config.is_recurrent:
                self.mark()
        return logits

    def row_logits(self, first: int, n_rows: int) -> NDArray[np.float32]:
        if n_rows <= 0 or first < 0 or first + n_rows > self._n_tokens:
            raise ValueError(
                f"rows {first} to {first} + {n_rows} are not among the {self._n_tokens} of the "
                "latest prefill call"
            )
        start = self.position - self._n_tokens
        shape = self._decoder.shapes[LOGITS]
        step = BLOCK_TOKENS if shape.is_per_token else 1
        logits = np.empty((n_rows, self.vocab_size), shape.dtype)
        for row in range(0, n_rows, step):
            part = logits[row : row + step]
            self._run_span(len(self._spans) - 1, first + row, len(part), start, part)
        return logits.astype(np.float32, copy=False)

    def decode(self, token: int) -> NDArray[np.float32]:
        tokens = np.array([token], np.int32)
        self._begin(tokens, 1)
        first = self.position
        self._attention.begin_call()
        self._n_tokens = 0
        self._context.set_tokens(tokens, first)
        views = self._attention_views(1)
        for span, stages in enumerate(self._spans[:-1]):
            self._run_span(span, 0, 1, first)
            layer = self._layers[stages[-1]]
            if layer in views:
                self._attention.decode(layer, **views[layer], **self._settings(layer, first, 1))
        logits = np.empty((1, self.vocab_size), self._decoder.shapes[LOGITS].dtype)
        self._run_span(len(self._spans) - 1, 0, 1, first, logits)
        self._attention.end_call()
        self._token_ids.append(token)
        result: NDArray[np.float32] = logits[0].astype(np.float32, copy=False)
        return result

    def reset(self) -> None:
        self._attention.reset()
        self._forget()

    def rewind(self, position: int) -> None:
        goes_before_the_end = position < self.prefill_end
        self._attention.rewind(position)
        if goes_before_the_end:
            self._forget()

    def _forget(self) -> None:
        """What is known of the end of the prompt."""
        self.prompt_logits = None
        self._n_tokens = 0

    def mark(self) -> bool:
        return self._attention.mark()

    def find_mark(self, position: int) -> int:
        return self._attention.find_mark(position)

    @property
    def marks(self) -> list[int]:
        """Where marks lie, ascending."""
        return self._attention.marks

    @property
    def mark_states(self) -> list[bytes]:
        return self._attention.mark_states

    def save_state(self) -> bytes:
        return self._attention.save_state()

    def load_state(
        self, state: bytes, token_ids: Sequence[int], marks: Sequence[bytes] = ()
    ) -> None:
        self._forget()
        self._attention.load_state(state, marks)
        self._token_ids = list(token_ids)
        if self.position != len(token_ids):
            position = self.position
            self.reset()
            raise ValueError(f"it is of {position} tokens, not {len(token_ids)}")

    def cached_rows(self) -> Sequence[NDArray[np.uint8]]:
        return self._attention.cached_rows()

    def _begin(self, tokens: NDArray[np.int32], most: int) -> None:
        """Refuses a call that cannot be made. Raises ValueError."""
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

    def _settings(self, layer: int, first: int, n_tokens: int) -> dict[str, Any]:
        """What a layer's attention is told besides its arrays."""
        tables, site = self._decoder.rotary[layer], self._decoder.sites[layer]
        assert isinstance(site, AttentionSite), "others do not attend"
        settings = {"window": site.window, "sinks": self._decoder.sinks[layer]}
        if tables is None or site.rotary is None:
            return settings
        end = first + n_tokens
        return {
            **settings,
            "rotary": (tables[0][first:end], tables[1][first:end]),
            "is_interleaved": site.rotary.is_interleaved,
        }

    def _attention_views(self, n_tokens: int) -> dict[int, dict[str, Any]]:
        """By layer the arrays of its attention; those of one token and the latest number stay."""
        if n_tokens not in self._views:
            self._views = {key: value for key, value in self._views.items() if key == 1}
            mixers = [(layer, self._decoder.stages[i].mixer) for i, layer in self._layers.items()]
            self._views[n_tokens] = {
                layer: _views(self._store, mixer, self._decoder.config, n_tokens)
                for layer, mixer in mixers
                if isinstance(mixer, AttentionValues)
            }
        return self._views[n_tokens]

    def _run_span(
        self,
        span: int,
        first_token: int,
        n_tokens: int,
        n_past: int,
        logits: NDArray[Any] | None = None,
    ) -> None:
        """Runs the stages of a span on a block of the call that begins at ``n_past``."""
        self._context.set_past(n_past + first_token)
        for i in self._spans[span]:
            segment = self._decoder.stages[i].segment
            if segment is not None:
                binding = self._bind(i, segment, first_token, n_tokens, n_past, logits)
                try:
                    segment.session.run_with_iobinding(binding)
                except Exception as error:
                    raise ResourceError(
                        f"onnxruntime failed in segment {i} of the model: {reason_of(error)}; if "
                        "memory is short, use a smaller context or batch (-c, -b)"
                    ) from None
            self._products.run(i, n_tokens, first_token, logits)
            mixer = self._decoder.stages[i].mixer
            if isinstance(mixer, ConvolutionValues):
                bcy, out = (
                    self._store.matrix(name, n_tokens, first_token)
                    for name in (mixer.bcy, mixer.out)
                )
                taps = self._decoder.taps[self._layers[i]]
                assert taps is not None, "it is a convolution"
                self._attention.short_conv(self._layers[i], bcy, taps, out)

    def _bind(
        self,
        i: int,
        segment: LoadedSegment,
        first_token: int,
        n_tokens: int,
        n_past: int,
        logits: NDArray[Any] | None,
    ) -> onnxruntime.IOBinding:
        """Where a segment reads and writes; kept for the first token of a call."""
        is_first = n_tokens == 1 and first_token == 0
        if is_first and i in self._one_token:
            return self._one_token[i]
        store = self._store
        binding = segment.session.io_binding()
        for name, dtype in segment.inputs.items():
            if name in CONTEXT_INPUTS:
                dims, address = self._context.place(name, first_token, n_tokens, n_past)
            else:
                dims, address = store.shape(name).of(n_tokens), store.address(name, first_token)
            binding.bind_input(segment.names[name], "cpu", 0, dtype, dims, address)
        for name, tensor in segment.constants.items():
            array = tensor.array()
            place = (array.dtype, array.shape, array.ctypes.data)
            binding.bind_input(name, "cpu", 0, *place)
        for name, dtype in segment.outputs.items():
            dims = store.shape(name).of(n_tokens)
            if name == LOGITS:
                assert logits is not None, "only the last span has logits"
                address = int(logits.ctypes.data)
            else:
                address = store.address(name, first_token)
            binding.bind_output(segment.names[name], "cpu", 0, dtype, dims, address)
        # A mask grows with every token, and logits lie elsewhere each time.
        stays = MASK not in segment.inputs and LOGITS not in segment.outputs
        if is_first and stays:
            self._one_token[i] = binding
        return binding


def _views(
    store: ValueStore, values: AttentionValues, config: ModelConfig, n_tokens: int
) -> dict[str, Any]:
    """``q``, ``k``, ``v`` and ``out`` of one layer, [n, heads, head_dim] each."""
    names = {"q": values.q, "k": values.k, "v": values.v, "out": values.out}
    heads = {
        what: store.matrix(name, n_tokens).reshape(n_tokens, -1, config.head_dim)
        for what, name in names.items()
        if name
    }
    if not values.k:
        ends = [config.n_heads, config.n_heads + config.n_kv_heads]
        heads |= zip("qkv", np.split(heads["q"], ends, axis=1), strict=True)
    return heads


class _Context:
    """The inputs that depend on tokens and positions only, in memory that stays in place."""

    def __init__(
        self, stages: Sequence[LoadedStage], shape: SessionShape, config: ModelConfig
    ) -> None:
        types: dict[str, np.dtype[Any]] = {}
        for segment in (stage.segment for stage in stages if stage.segment is not None):
            types |= {n: dtype for n, dtype in segment.inputs.items() if n in CONTEXT_INPUTS}
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

    def place(self, name: str, first_token: int, n_rows: int, n_past: int) -> tuple[list[int], int]:
        """Dimensions and address of an input for some rows of a call."""
        value = self._values[name]
        address = int(value.ctypes.data)
        if name == MASK:
            return [1, n_past + first_token + n_rows], address
        if name == PAST_SHAPE:
            return [4], address
        return [1, n_rows], address + first_token * value.itemsize

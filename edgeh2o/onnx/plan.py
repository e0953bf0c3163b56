"""A loaded decoder: its stages, the shapes of what crosses, and where that is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import FormatError
from ..model_config import ModelConfig
from .config import OnnxConfig
from .cut import CONTEXT_INPUTS, LOGITS, Site
from .products import ProductGroup
from .sessions import AttentionValues, LoadedStage, MixerValues

if TYPE_CHECKING:
    from numpy.typing import NDArray

    # x, weights and outs of a Matmul.
    _Operands = tuple[NDArray[np.float32], Sequence[_core.Linear], Sequence[NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class ValueShape:
    """Shape and type of a value; the axis of the tokens is -1. One without it never changes."""

    dims: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def is_per_token(self) -> bool:
        return -1 in self.dims

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return int(np.prod([dim for dim in self.dims if dim >= 0])) * self.dtype.itemsize

    def of(self, n_tokens: int) -> list[int]:
        """The dimensions for ``n_tokens`` tokens."""
        return [n_tokens if dim < 0 else dim for dim in self.dims]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDecoder:
    """A decoder that can run: its stages, the shapes of what crosses, and the layers' mixers.

    ``taps`` has for each of ``sites`` the weights [n_taps, dim] of a convolution, else None,
    ``rotary`` has for each of ``sites`` the tables of cos and sin [positions, pairs] of a node that
    rotates, else None; ``sinks`` its logits [heads] without values, or None. ``residuals`` name the
    stream that each layer's output is added to; there are none where that is not known.
    """

    config: OnnxConfig
    stages: Sequence[LoadedStage]
    shapes: Mapping[str, ValueShape]
    sites: Sequence[Site]
    taps: Sequence[NDArray[np.float32] | None]
    rotary: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]] | None]
    sinks: Sequence[NDArray[np.float32] | None]
    residuals: Sequence[str]


def check_shapes(
    shapes: Mapping[str, ValueShape], layers: Sequence[MixerValues], config: ModelConfig
) -> None:
    """What the stages give must be what the layers take. Raises FormatError."""
    kv_width = config.n_kv_heads * config.head_dim
    q_width = config.n_heads * config.head_dim
    for i, values in enumerate(layers):
        if not isinstance(values, AttentionValues):
            widths = [3 * values.width]
        else:
            widths = [q_width, kv_width, kv_width] if values.k else [q_width + 2 * kv_width]
        for name, width in zip(values.sources, widths, strict=True):
            shape = shapes[name]
            if not shape.is_per_token or shape.row_bytes != 4 * width:
                raise FormatError(
                    f"layer {i} gives {shape.row_bytes // 4} numbers per token where it takes "
                    f"{width}; the graph is inconsistent"
                )
    dims = shapes[LOGITS].dims
    if dims[-1] != config.vocab_size:
        raise FormatError(
            f"the model gives {dims[-1]} logits, its vocabulary has {config.vocab_size}"
        )


class ValueStore:
    """Memory for the values that cross, for up to ``max_tokens`` tokens.

    The stages up to an attention, a span, run on ``block_tokens`` tokens at a time. So a value that
    lives and dies inside a span needs no more; one that an attention or a later span reads is kept
    for all tokens. Values whose lives do not meet share memory.
    """

    def __init__(self, decoder: LoadedDecoder, max_tokens: int, block_tokens: int) -> None:
        self._shapes = shapes = decoder.shapes
        lives = _find_lives(decoder.stages)
        self._in_block = {name for name, life in lives.items() if life.is_within_span}
        self._buffers: dict[str, NDArray[np.uint8]] = {}
        self.n_bytes = 0
        free: dict[tuple[bool, int], list[tuple[_Life, NDArray[np.uint8]]]] = {}
        for name in sorted(lives, key=lambda name: lives[name].birth):
            if name == LOGITS:
                continue
            shape, life, in_block = shapes[name], lives[name], name in self._in_block
            n_bytes = shape.row_bytes
            if shape.is_per_token:
                n_bytes *= block_tokens if in_block else max_tokens
            slots = free.setdefault((in_block, n_bytes), [])
            fit = next((i for i, (last, _) in enumerate(slots) if last.ends_before(life)), None)
            if fit is None or not shape.is_per_token:
                self.n_bytes += n_bytes
                buffer: NDArray[np.uint8] = np.empty(max(1, n_bytes), np.uint8)
            else:
                buffer = slots.pop(fit)[1]
            if shape.is_per_token:
                slots.append((life, buffer))
            self._buffers[name] = buffer

    def shape(self, name: str) -> ValueShape:
        """The shape of a value."""
        return self._shapes[name]

    def address(self, name: str, first_token: int) -> int:
        """Where a value lies from a token on, the first of a block."""
        return int(self._buffers[name].ctypes.data) + self._offset(name, first_token)

    def matrix(self, name: str, n_tokens: int, first_token: int = 0) -> NDArray[np.float32]:
        """The rows of some tokens of a float32 value, [rows, width]."""
        shape = self._shapes[name]
        dims = shape.of(n_tokens)
        offset = self._offset(name, first_token)
        flat = self._buffers[name][offset : offset + 4 * math.prod(dims)]
        return flat.view(np.float32).reshape(-1, dims[-1])

    def copy_rows(self, name: str, n_tokens: int) -> NDArray[np.float32]:
        """The rows of the first tokens of a value that is kept for all, in float32."""
        shape = self._shapes[name]
        dims = shape.of(n_tokens)
        flat = self._buffers[name][: shape.dtype.itemsize * math.prod(dims)].view(shape.dtype)
        return flat.reshape(-1, dims[-1]).astype(np.float32)

    def _offset(self, name: str, first_token: int) -> int:
        shape = self._shapes[name]
        has_all = shape.is_per_token and name not in self._in_block
        return first_token * shape.row_bytes if has_all else 0


@dataclass(slots=True)
class _Life:
    """From the first to the last use of a value: (twice the span, step of the stage in it).

    The attention that ends a span comes at the odd number after it.
    """

    birth: tuple[int, int]
    death: tuple[int, int]

    @property
    def is_within_span(self) -> bool:
        return self.birth[0] == self.death[0] and self.birth[0] % 2 == 0

    def ends_before(self, other: _Life) -> bool:
        # What a span keeps must last for all of its blocks.
        if self.is_within_span:
            return self.death < other.birth
        return self.death[0] < other.birth[0]


def find_spans(stages: Sequence[LoadedStage]) -> list[range]:
    """The stages up to each attention, or to the last layer, and those after it.

    What comes before the last layer's end is computed for all tokens, the rest for those whose
    logits are wanted. A convolution needs the tokens in order, not all at once: it ends no span.
    """
    mixing = [i for i, stage in enumerate(stages) if stage.mixer is not None]
    ends = [i + 1 for i in mixing if i == mixing[-1] or _attends(stages[i])]
    return [range(*pair) for pair in pairwise([0, *ends, len(stages)])]


def _attends(stage: LoadedStage) -> bool:
    return isinstance(stage.mixer, AttentionValues)


def _find_lives(stages: Sequence[LoadedStage]) -> dict[str, _Life]:
    lives: dict[str, _Life] = {}

    def note(names: Iterable[str], time: tuple[int, int]) -> None:
        for name in names:
            lives.setdefault(name, _Life(time, time)).death = time

    for span, steps in enumerate(find_spans(stages)):
        for step in steps:
            stage, now = stages[step], (2 * span, 3 * step)
            if stage.segment is not None:
                note((n for n in stage.segment.inputs if n not in CONTEXT_INPUTS), now)
                note(stage.segment.outputs, now)
            for group in stage.products:
                note([group.input, *group.outputs], (2 * span, 3 * step + 1))
            if stage.mixer is not None:
                then = (2 * span + 1, 0) if _attends(stage) else (2 * span, 3 * step + 2)
                note([*stage.mixer.sources, stage.mixer.out], then)
    return lives


class ProductRunner:
    """Runs the products of a stage on values of a store, at most ``block_tokens`` at a time."""

    def __init__(
        self, decoder: LoadedDecoder, store: ValueStore, block_tokens: int, threads: int
    ) -> None:
        self._stages, shapes = decoder.stages, decoder.shapes
        self._store = store
        self._one_token: dict[int, list[_Operands]] = {}
        groups = [group for stage in self._stages for group in stage.products]
        depth = max((group.depth for group in groups), default=1)
        rows = max((math.prod(shapes[g.input].of(block_tokens)[:-1]) for g in groups), default=1)
        self._matmul = _core.Matmul(rows, depth, threads)

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that the products need besides the values."""
        return self._matmul.n_bytes

    def run(self, stage: int, n_tokens: int, first_token: int, logits: NDArray[Any] | None) -> None:
        """The products of ``stage`` for a block; those that are the logits go there."""
        is_first = n_tokens == 1 and first_token == 0
        operands = self._one_token.get(stage) if is_first else None
        if operands is None:
            groups = self._stages[stage].products
            operands = [self._operands(group, n_tokens, first_token, logits) for group in groups]
            if is_first and not any(LOGITS in group.outputs for group in groups):
                self._one_token[stage] = operands
        for x, weights, outs in operands:
            self._matmul.run(x, weights, outs)

    def _operands(
        self, group: ProductGroup, n_tokens: int, first_token: int, logits: NDArray[Any] | None
    ) -> _Operands:
        outs = []
        for name in group.outputs:
            if name == LOGITS:
                assert logits is not None, "only the last span has logits"
                outs.append(logits)
            else:
                outs.append(self._store.matrix(name, n_tokens, first_token))
        return self._store.matrix(group.input, n_tokens, first_token), group.linears, outs

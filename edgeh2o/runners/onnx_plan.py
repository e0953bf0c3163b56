"""The shapes of what crosses between segments, found by trying them out, and where it is kept.

Before a model is used, its segments run on a few tokens with made-up attention. That shows the
shapes, that they follow the number of tokens and nothing else, and that every row of the output
depends on its own row of the input alone: prompts are then read in blocks of rows, and the last
segment for one row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError
from ..formats.metadata import quote
from .onnx_cut import CONTEXT_INPUTS, LOGITS
from .onnx_sessions import SegmentSession, attended_name, context_feed

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of the largest output: rounding that depends on the number of rows.
ROW_TOLERANCE = 2e-3
# With operators that quantise all rows of a call by one scale.
JOINT_ROW_TOLERANCE = 0.05
JOINT_OPERATORS = frozenset(
    ("DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM")
)


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

    def of(self, n_rows: int) -> list[int]:
        """The dimensions for ``n_rows`` tokens."""
        return [n_rows if dim < 0 else dim for dim in self.dims]


def probe_segments(
    sessions: Sequence[SegmentSession],
    attended_width: int,
    past_shape: Sequence[int],
    operators: Collection[str],
) -> dict[str, ValueShape]:
    """Shapes of all values that cross, by name. Raises FormatError for an unfit graph.

    ``operators`` are those of the graph.
    """
    tolerance = ROW_TOLERANCE if JOINT_OPERATORS.isdisjoint(operators) else JOINT_ROW_TOLERANCE
    two, three, later = (
        _run_all(sessions, n, n_past, attended_width, past_shape)
        for n, n_past in ((2, 0), (3, 0), (2, 3))
    )
    shapes = {}
    for name, value in two.items():
        shapes[name] = _find_shape(name, value, three[name], later[name])
    for session in sessions:
        _check_rows(session, three, shapes, past_shape, tolerance)
    return shapes


def _run_all(
    sessions: Sequence[SegmentSession],
    n_tokens: int,
    n_past: int,
    attended_width: int,
    past_shape: Sequence[int],
) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    values: dict[str, NDArray[Any]] = {}
    for i, session in enumerate(sessions):
        feed = context_feed(session, n_past, n_tokens, past_shape)
        feed |= {name: values[name] for name in session.inputs if name not in CONTEXT_INPUTS}
        values |= dict(zip(session.outputs, _run(session, feed), strict=True))
        attended = rng.standard_normal((1, n_tokens, attended_width), np.float32)
        values[attended_name(i)] = attended
    return values


def _run(session: SegmentSession, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    try:
        outputs: list[NDArray[Any]] = session.session.run(list(session.outputs), dict(feed))
        return outputs
    except Exception as error:
        reason = " ".join(str(error).split())
        raise FormatError(f"the model does not run on a few tokens: {reason:.400}") from None


def _find_shape(
    name: str, two: NDArray[Any], three: NDArray[Any], later: NDArray[Any]
) -> ValueShape:
    if two.shape != later.shape or two.ndim != three.ndim:
        raise FormatError(
            f"the value {quote(name)} changes its shape with the past outside of the attention"
        )
    changed = [i for i in range(two.ndim) if two.shape[i] != three.shape[i]]
    if not changed:
        return ValueShape(two.shape, two.dtype)
    axis = changed[0]
    if len(changed) > 1 or two.shape[axis] != 2 or any(dim != 1 for dim in two.shape[:axis]):
        raise FormatError(
            f"the value {quote(name)} has shape {list(two.shape)} for 2 tokens and "
            f"{list(three.shape)} for 3: not one row per token; export the model with attention "
            "inputs [batch, tokens, width]"
        )
    dims = (*two.shape[:axis], -1, *two.shape[axis + 1 :])
    return ValueShape(dims, two.dtype)


def _check_rows(
    session: SegmentSession,
    values: Mapping[str, NDArray[Any]],
    shapes: Mapping[str, ValueShape],
    past_shape: Sequence[int],
    tolerance: float,
) -> None:
    """The last of three rows alone must give what it gives among them."""
    feed = context_feed(session, 2, 1, past_shape)
    for name in session.inputs:
        if name not in CONTEXT_INPUTS:
            feed[name] = _last_row(values[name], shapes[name])
    for name, found in zip(session.outputs, _run(session, feed), strict=True):
        expected = _last_row(values[name], shapes[name])
        if found.shape != expected.shape or not _is_close(found, expected, tolerance):
            raise FormatError(
                f"the value {quote(name)} of one token depends on other tokens outside of the "
                "attention; such models are not supported"
            )


def _last_row(value: NDArray[Any], shape: ValueShape) -> NDArray[Any]:
    if not shape.is_per_token:
        return value
    axis = shape.dims.index(-1)
    return np.take(value, [value.shape[axis] - 1], axis)


def _is_close(found: NDArray[Any], expected: NDArray[Any], tolerance: float) -> bool:
    if found.dtype.kind != "f":
        return np.array_equal(found, expected)
    largest = float(np.abs(expected.astype(np.float64)).max(initial=0.0))
    atol = tolerance * largest + 1e-5
    return bool(np.allclose(found.astype(np.float64), expected, rtol=0, atol=atol))


class ValueStore:
    """Memory for the values that cross, for up to ``max_rows`` tokens.

    Values whose lives do not meet share memory. Segment i runs at time 2 i, its attention after it.
    """

    def __init__(
        self,
        sessions: Sequence[SegmentSession],
        shapes: Mapping[str, ValueShape],
        max_rows: int,
    ) -> None:
        self._shapes = shapes
        births, deaths = _find_lives(sessions)
        free: dict[int, list[tuple[int, NDArray[np.uint8]]]] = {}
        self._buffers: dict[str, NDArray[np.uint8]] = {}
        self.n_bytes = 0
        for name in sorted(births, key=lambda name: births[name]):
            shape = shapes[name]
            if name == LOGITS:
                continue
            n_bytes = shape.row_bytes * (max_rows if shape.is_per_token else 1)
            slots = free.setdefault(n_bytes if shape.is_per_token else -1, [])
            fit = next((i for i, (end, _) in enumerate(slots) if end < births[name]), None)
            if fit is None or not shape.is_per_token:
                self.n_bytes += n_bytes
                buffer = np.empty(max(1, n_bytes), np.uint8)
            else:
                buffer = slots.pop(fit)[1]
            if shape.is_per_token:
                slots.append((deaths[name], buffer))
            self._buffers[name] = buffer

    def shape(self, name: str) -> ValueShape:
        """The shape of a value."""
        return self._shapes[name]

    def address(self, name: str, first_row: int) -> int:
        """Where a value lies from row ``first_row`` on."""
        shape = self._shapes[name]
        offset = first_row * shape.row_bytes if shape.is_per_token else 0
        return int(self._buffers[name].ctypes.data) + offset

    def rows(self, name: str, n_rows: int) -> NDArray[np.float32]:
        """The first rows of a float32 value, [n_rows, width]."""
        n_bytes = n_rows * self._shapes[name].row_bytes
        return self._buffers[name][:n_bytes].view(np.float32).reshape(n_rows, -1)


def _find_lives(sessions: Sequence[SegmentSession]) -> tuple[dict[str, int], dict[str, int]]:
    births: dict[str, int] = {}
    deaths: dict[str, int] = {}
    for i, session in enumerate(sessions):
        for name in session.inputs:
            deaths[name] = 2 * i
        for name in session.outputs:
            births[name] = 2 * i
            deaths[name] = 2 * i + 1  # the attention reads it, if nobody else
        births[attended_name(i)] = 2 * i + 1
        deaths[attended_name(i)] = 2 * i + 2
    births.pop(attended_name(len(sessions) - 1), None)
    return births, deaths

"""The shapes of what crosses between segments, found by trying them out.

Before a model is used, its segments run on a few tokens with made-up attention and products. That
shows the shapes, that they follow the number of tokens and nothing else, and that every row of the
output depends on its own row of the input alone: prompts are then read in blocks of rows, and the
last segment for one row. Of layers that compute the same the first is tried.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError
from ..formats.metadata import quote
from ..model_config import ModelConfig
from .plan import ValueShape
from .products import ProductGroup
from .segment_sessions import LoadedSegment
from .sessions import LoadedStage

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of the largest output: rounding that depends on the number of rows.
ROW_TOLERANCE = 2e-3
# With operators that quantise all rows of a call by one scale: alone, a row is rounded otherwise.
# Up to 0.026 was measured on tiny models (0.061 with sums that saturate, which the sessions are
# asked not to do); what a sum over tokens changes is far beyond.
JOINT_ROW_TOLERANCE = 0.05
JOINT_OPERATORS = frozenset(
    ("DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM")
)


def probe_stages(
    stages: Sequence[LoadedStage], config: ModelConfig, operators: Collection[str]
) -> dict[str, ValueShape]:
    """Shapes of all values that cross, by name. Raises FormatError for an unfit graph.

    ``operators`` are those of the graph.
    """
    tolerance = ROW_TOLERANCE if JOINT_OPERATORS.isdisjoint(operators) else JOINT_ROW_TOLERANCE
    trial = _Trial(config, tolerance)
    three, two = (trial.run_all(stages, n, n_past) for n, n_past in ((3, 0), (2, 3)))
    shapes = {name: _find_shape(name, two[name], three[name]) for name in two}
    for stage in stages:
        if stage.segment is not None:
            trial.check_rows(stage.segment, three, shapes)
    return shapes


class _Trial:
    """Runs segments; of those of one kind that take the same shapes, the first only."""

    def __init__(self, config: ModelConfig, tolerance: float) -> None:
        self._config, self._tolerance = config, tolerance
        self._n_made_up = 0
        self._tried: dict[Hashable, list[NDArray[Any]]] = {}

    def run_all(
        self, stages: Sequence[LoadedStage], n_tokens: int, n_past: int
    ) -> dict[str, NDArray[Any]]:
        """All values that cross, by name, for ``n_tokens`` after ``n_past``."""
        values: dict[str, NDArray[Any]] = {}
        for stage in stages:
            segment = stage.segment
            if segment is not None:
                feed = segment.context_feed(n_past, n_tokens, self._config)
                feed |= {name: values[name] for name in segment.inputs if name not in feed}
                values |= self._run(segment, feed)
            for group in stage.products:
                _check_columns(group, values[group.input])
                for name, linear in zip(group.outputs, group.linears, strict=True):
                    values[name] = self._make_up((*values[group.input].shape[:-1], linear.rows))
            if stage.mixer is not None:
                values[stage.mixer.out] = self._make_up((1, n_tokens, stage.mixer.width))
        return values

    def _run(
        self, segment: LoadedSegment, feed: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """What integers say may change shapes: they are told apart by their values."""
        kinds = tuple(
            (x.shape, x.dtype, b"" if x.dtype.kind == "f" else x.tobytes())
            for x in (feed[name] for name in segment.inputs)
        )
        key = (segment.kind, kinds)
        if key not in self._tried:
            self._tried[key] = list(segment.run(feed).values())
        return dict(zip(segment.outputs, self._tried[key], strict=True))

    def _make_up(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Numbers up to 2, no two rows or values alike."""
        self._n_made_up += 1
        places = np.arange(math.prod(shape), dtype=np.float32)
        result: NDArray[np.float32] = (2 * np.sin(1.7 * places + self._n_made_up)).reshape(shape)
        return result

    def check_rows(
        self,
        segment: LoadedSegment,
        values: Mapping[str, NDArray[Any]],
        shapes: Mapping[str, ValueShape],
    ) -> None:
        """The last of three rows alone must give what it gives among them. Raises FormatError."""
        feed = segment.context_feed(2, 1, self._config)
        crossing = [name for name in segment.inputs if name not in feed]
        feed |= {name: _last_row(values[name], shapes[name]) for name in crossing}
        for name, found in self._run(segment, feed).items():
            expected = _last_row(values[name], shapes[name])
            if found is expected:
                continue
            if found.shape != expected.shape or not _is_close(found, expected, self._tolerance):
                raise FormatError(
                    f"the value {quote(name)} of one token depends on other tokens outside of the "
                    "attention; such models are not supported"
                )


def _check_columns(group: ProductGroup, x: NDArray[Any]) -> None:
    if x.dtype != np.float32 or x.ndim == 0 or x.shape[-1] != group.depth:
        raise FormatError(
            f"the value {quote(group.input)} is {x.dtype} {list(x.shape)}, but the product that "
            f"reads it takes float32 with {group.depth} columns"
        )


def _find_shape(name: str, two: NDArray[Any], three: NDArray[Any]) -> ValueShape:
    """From a value for two tokens after three, and for three tokens."""
    if two.ndim != three.ndim:
        raise FormatError(
            f"the value {quote(name)} changes its shape with the past outside of the attention"
        )
    changed = [i for i in range(two.ndim) if two.shape[i] != three.shape[i]]
    if not changed:
        return ValueShape(two.shape, two.dtype)
    axis = changed[0]
    if len(changed) > 1 or two.shape[axis] != 2 or any(dim != 1 for dim in two.shape[:axis]):
        raise FormatError(
            f"the value {quote(name)} has shape {list(two.shape)} for 2 tokens after 3 "
            f"and {list(three.shape)} for 3: not one row per token; export the model with "
            "attention inputs [batch, tokens, width]"
        )
    dims = (*two.shape[:axis], -1, *two.shape[axis + 1 :])
    return ValueShape(dims, two.dtype)


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

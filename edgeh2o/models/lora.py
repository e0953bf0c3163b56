"""Which matrices of the core a low-rank adapter changes, and what it adds to them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .. import _core
from ..errors import FormatError
from ..formats.lora_file import LowRankPart
from ..formats.metadata import quote

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .tensors import TensorBinding

MERGE = "merge it into the model before"


class Adapter(Protocol):
    """An open adapter in the words of the model's tensors, which it was found to fit."""

    @property
    def path(self) -> os.PathLike[str]: ...

    @property
    def changed(self) -> Collection[str]:
        """Names of the tensors that it changes."""

    def part(self, name: str, matrix: int) -> LowRankPart | None:
        """What is added to a tensor, of a stack to the matrix of this number; None: nothing."""


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """What an adapter adds to the matrix that ``binding`` makes, B A, by its number.

    ``part`` is of the whole matrix of the file, whose rows from ``first_row`` on ``binding`` has.
    """

    binding: TensorBinding
    first_row: int
    adapter: int
    part: LowRankPart
    path: os.PathLike[str]

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, at the most."""
        return 4 * self.part.rank * (self.binding.n_rows + self.binding.info.cols)

    def matrices(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A, [rank, cols], and B, [n_rows, rank], which holds the part's factor.

        Raises FormatError for those that are too large, and as its part.
        """
        import numpy as np

        down, factor = self.part.read_a(), self.part.factor
        up = self.part.read_b()[self.first_row :][: self.binding.n_rows]
        if self.binding.row_order is not None:
            up = up[np.frombuffer(self.binding.row_order, np.int32)]
        with np.errstate(over="ignore", invalid="ignore"):
            up = up * np.float32(factor)
        if not np.isfinite(up).all():
            raise FormatError(
                f"{self.path}: {quote(self.binding.info.name)}: what is added has numbers that are "
                f"too large, times {factor:g}; fetch it again"
            )
        return down, up


def bind_updates(
    bindings: Sequence[TensorBinding], adapters: Sequence[Adapter]
) -> list[LowRankUpdate]:
    """What ``adapters`` add to the matrices of ``bindings``, one matrix after another.

    Raises FormatError, which names file and tensor, for a tensor whose adapters are not supported.
    """
    updates = []
    for binding in bindings:
        shape, name = binding.info.shape, binding.info.name
        first = next((each.path for each in adapters if name in each.changed), None)
        if first is None:
            continue
        if binding.is_transposed or len(shape) < 2:
            raise FormatError(
                f"{first}: {quote(name)} is a tensor whose adapters are not supported; {MERGE}"
            )
        matrix, first_row = divmod(binding.first_row, shape[1])
        for number, each in enumerate(adapters):
            if part := each.part(name, matrix):
                updates.append(LowRankUpdate(binding, first_row, number, part, each.path))
    return updates


def largest_rank(updates: Iterable[LowRankUpdate]) -> int:
    """Of those of one matrix together, the most that any matrix has."""
    ranks: Counter[str] = Counter()
    for update in updates:
        ranks[update.binding.name] += update.part.rank
    return max(ranks.values(), default=0)


def add_updates(model: _core.Model, updates: Sequence[LowRankUpdate]) -> None:
    """Adds them to the matrices of the core, which are there.

    Raises FormatError for a matrix that takes none, and as ``LowRankPart``.
    """
    for update in updates:
        a, b = update.matrices()
        (a_type, a_bytes), (b_type, b_bytes) = _smallest(a), _smallest(b)
        name, adapter, rank = update.binding.name, update.adapter, update.part.rank
        try:
            model.add_update(name, adapter, rank, a_bytes, a_type, b_bytes, b_type)
        except ValueError as error:
            raise FormatError(f"{update.path}: {error}; {MERGE}") from None


def _smallest(values: NDArray[np.float32]) -> tuple[str, bytes]:
    """Half precision where that loses nothing, else single."""
    import numpy as np

    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.array_equal(half.astype(np.float32), values):
        return "F16", half.tobytes()
    return "F32", np.ascontiguousarray(values).tobytes()

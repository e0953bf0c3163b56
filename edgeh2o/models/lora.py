"""Which matrices of the core a low-rank adapter changes, and what it adds to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .. import _core
from ..errors import FormatError
from ..formats.gguf_header import TensorInfo
from ..formats.lora_file import LoraFile, LoraPair
from ..formats.metadata import quote

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .tensors import TensorBinding

    _Reader = Callable[[LoraFile, TensorInfo], NDArray[np.float32]]

_MERGE = "merge it into the model before"


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """What adapters add to the matrix that ``binding`` makes: B A of each, one after another."""

    binding: TensorBinding
    parts: tuple[tuple[LoraFile, LoraPair, float], ...]

    @property
    def rank(self) -> int:
        return sum(pair.rank for _, pair, _ in self.parts)

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, at the most."""
        return 4 * self.rank * (self.binding.n_rows + self.binding.info.cols)

    def matrices(self, read: _Reader) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A, [rank, cols], and B, [n_rows, rank], which holds all factors.

        ``read`` gives a tensor of a file as [rows, cols]. Raises as that.
        """
        import numpy as np

        downs, ups = [], []
        for file, pair, scale in self.parts:
            binding, rank = self.binding, pair.rank
            # Of a stack: the matrix in which the rows lie.
            first = binding.first_row // self._rows_of_matrix * rank
            downs.append(read(file, pair.a)[first : first + rank])
            up = read(file, pair.b)[binding.first_row :][: binding.n_rows]
            if binding.row_order is not None:
                up = up[np.frombuffer(binding.row_order, np.int32)]
            ups.append(up * np.float32(file.factor(pair) * scale))
        return np.concatenate(downs), np.concatenate(ups, axis=1)

    @property
    def _rows_of_matrix(self) -> int:
        return self.binding.info.shape[1]


def bind_updates(
    bindings: Sequence[TensorBinding],
    adapters: Sequence[tuple[LoraFile, float]],
    architecture: str,
    tensors: Mapping[str, TensorInfo],
) -> list[LowRankUpdate]:
    """What ``adapters`` add, with the scale that each gets, to the matrices of ``bindings``.

    ``tensors`` are all of the model's file, of which some may be read by nothing. Raises
    FormatError, which names file and tensor, for an adapter of another model.
    """
    parts: dict[str, list[tuple[LoraFile, LoraPair, float]]] = {}
    for file, scale in adapters:
        if file.architecture != architecture:
            raise FormatError(
                f"{file.path}: an adapter for models of architecture {quote(file.architecture)}, "
                f"this one is of {quote(architecture)}"
            )
        for name, pair in file.pairs.items():
            if name not in tensors:
                raise FormatError(
                    f"{file.path}: the model has no tensor {quote(name)}; the adapter is for "
                    "another model"
                )
            _check_pair(file, pair, tensors[name])
            parts.setdefault(name, []).append((file, pair, scale))
    updates = []
    for binding in bindings:
        of_tensor = parts.get(binding.info.name)
        if of_tensor is None:
            continue
        if binding.is_transposed or len(binding.info.shape) < 2:
            raise FormatError(
                f"{of_tensor[0][0].path}: {quote(binding.info.name)} is a tensor whose adapters "
                f"are not supported; {_MERGE}"
            )
        updates.append(LowRankUpdate(binding, tuple(of_tensor)))
    return updates


def add_updates(model: _core.Model, updates: Sequence[LowRankUpdate]) -> None:
    """Adds them to the matrices of the core, which are there.

    Raises FormatError for a matrix that takes none and a tensor that is malformed, and as
    ``GgufFile.tensor_bytes``.
    """
    # Those of a stack, whose matrices follow each other, are read once.
    read = lru_cache(2 * max((len(update.parts) for update in updates), default=0))(_floats)
    for update in updates:
        a, b = update.matrices(read)
        (a_type, a_bytes), (b_type, b_bytes) = _smallest(a), _smallest(b)
        try:
            model.add_update(update.binding.name, update.rank, a_bytes, a_type, b_bytes, b_type)
        except ValueError as error:
            raise FormatError(f"{update.parts[0][0].path}: {error}; {_MERGE}") from None


def _check_pair(file: LoraFile, pair: LoraPair, base: TensorInfo) -> None:
    a, b = pair.a.shape, pair.b.shape
    fits = a == (base.cols, pair.rank, *base.shape[2:]) and b == (pair.rank, *base.shape[1:])
    if len(base.shape) < 2 or not fits:
        raise FormatError(
            f"{file.path}: {quote(pair.a.name)} and its other half are {_shown(a)} and "
            f"{_shown(b)}, which is none of {_shown(base.shape)}; the adapter is for another model"
        )


def _shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _floats(file: LoraFile, info: TensorInfo) -> NDArray[np.float32]:
    """A tensor as [rows, cols], the matrices of a stack below each other."""
    import numpy as np

    data = file.file.tensor_bytes(info)
    try:
        values, bad_row = _core.convert_rows(data, info.type_name, "F32", info.rows, info.cols)
    except ValueError as error:
        raise FormatError(f"{file.path}: tensor {quote(info.name)}: {error}") from None
    if bad_row is not None:
        raise FormatError(
            f"{file.path}: tensor {quote(info.name)} has NaN or infinite weights; fetch it again"
        )
    return np.frombuffer(values, np.float32).reshape(info.rows, info.cols)


def _smallest(values: NDArray[np.float32]) -> tuple[str, bytes]:
    """Half precision where that loses nothing, else single."""
    import numpy as np

    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.array_equal(half.astype(np.float32), values):
        return "F16", half.tobytes()
    return "F32", np.ascontiguousarray(values).tobytes()

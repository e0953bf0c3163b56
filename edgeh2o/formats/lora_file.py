"""GGUF files of low-rank adapters, as llama.cpp's convert_lora_to_gguf.py writes them.

A matrix of the model, ``blk.0.attn_q.weight``, has two tensors: its name with ``.lora_a``, [rank,
cols], and with ``.lora_b``, [rows, rank]; of a stack of matrices both are stacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .. import _core
from ..errors import FormatError
from .fingerprint import fingerprint_file
from .gguf import GgufFile, TensorInfo, open_gguf
from .metadata import quote

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TYPE_KEY, KIND_KEY, ALPHA_KEY = "general.type", "adapter.type", "adapter.lora.alpha"
INVOCATION_KEY = "adapter.alora.invocation_tokens"
ADAPTER = "adapter"
A_SUFFIX, B_SUFFIX = ".lora_a", ".lora_b"


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """What an adapter adds to one matrix: ``factor`` times B A (Hu et al. 2021, section 4.1).

    ``read_a`` gives A, float32 [rank, cols], ``read_b`` gives B, float32 [rows, rank]. Both raise
    FormatError for a tensor with NaN, and as ``OpenFile.read``.
    """

    rank: int
    factor: float
    read_a: Callable[[], NDArray[np.float32]]
    read_b: Callable[[], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The tensors of one matrix of the model, or of a stack of matrices."""

    a: TensorInfo
    b: TensorInfo

    @property
    def rank(self) -> int:
        return self.b.cols


class LoraFile:
    """An open adapter. A context manager. Raises FormatError, and ResourceError as ``open_gguf``.

    ``pairs`` are by the name of the matrix; ``alpha`` over the rank is what the product counts, 0:
    it counts as it is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = open_gguf(path)
        self.path = self.file.path
        try:
            self.architecture, self.alpha = _read_kind(self.file)
            self.pairs = _read_pairs(self.file)
        except FormatError as error:
            self.file.close()
            raise FormatError(f"{self.path}: {error}") from None
        except BaseException:
            self.file.close()
            raise
        # Matrices of a stack follow each other.
        self._read = lru_cache(2)(self._floats)

    @property
    def changed(self) -> Collection[str]:
        """Names of the tensors that it changes."""
        return self.pairs.keys()

    @property
    def fingerprint(self) -> str:
        """As ``fingerprint_file``, of the whole adapter. Raises as that."""
        return fingerprint_file(self.file, self.file.tensors.values())

    def check_fits(self, architecture: str, tensors: Mapping[str, TensorInfo]) -> None:
        """Raises FormatError, which names the tensor, for an adapter of another model.

        ``tensors`` are all of the model's file, of which some may be read by nothing.
        """
        if self.architecture != architecture:
            raise FormatError(
                f"{self.path}: an adapter for models of architecture {quote(self.architecture)}, "
                f"this one is of {quote(architecture)}"
            )
        for name, pair in self.pairs.items():
            if name not in tensors:
                raise FormatError(
                    f"{self.path}: the model has no tensor {quote(name)}; the adapter is for "
                    "another model"
                )
            _check_pair(self.path, pair, tensors[name])

    def part(self, name: str, matrix: int) -> LowRankPart | None:
        """What is added to a tensor, of a stack to the matrix of this number; None: nothing."""
        pair = self.pairs.get(name)
        if pair is None:
            return None
        rank, n_rows = pair.rank, pair.b.shape[1]
        return LowRankPart(
            rank,
            self.alpha / rank if self.alpha else 1.0,
            lambda: self._read(pair.a)[matrix * rank :][:rank],
            lambda: self._read(pair.b)[matrix * n_rows :][:n_rows],
        )

    def _floats(self, info: TensorInfo) -> NDArray[np.float32]:
        """A tensor as [rows, cols], the matrices of a stack below each other."""
        data = self.file.tensor_bytes(info)
        return read_floats(self.path, info.name, data, info.type_name, (info.rows, info.cols))

    def close(self) -> None:
        """Closes the file, and forgets what was read last."""
        self._read.cache_clear()
        self.file.close()

    def __enter__(self) -> LoraFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_floats(
    path: os.PathLike[str], name: str, data: bytes | memoryview, dtype: str, shape: tuple[int, int]
) -> NDArray[np.float32]:
    """The tensor ``name`` of an adapter as float32 of ``shape``, rows and columns.

    Raises FormatError for a number that is NaN or infinite.
    """
    import numpy as np

    try:
        values, bad_row = _core.convert_rows(data, dtype, "F32", *shape)
    except ValueError as error:
        raise FormatError(f"{path}: tensor {quote(name)}: {error}") from None
    if bad_row is not None:
        raise FormatError(
            f"{path}: tensor {quote(name)} has NaN or infinite weights; fetch it again"
        )
    return np.frombuffer(values, np.float32).reshape(shape)


def _check_pair(path: os.PathLike[str], pair: LoraPair, base: TensorInfo) -> None:
    a, b = pair.a.shape, pair.b.shape
    fits = a == (base.cols, pair.rank, *base.shape[2:]) and b == (pair.rank, *base.shape[1:])
    if len(base.shape) < 2 or not fits:
        raise FormatError(
            f"{path}: {quote(pair.a.name)} and its other half are {show_shape(a)} and "
            f"{show_shape(b)}, which is none of {show_shape(base.shape)}; the adapter is for "
            "another model"
        )


def show_shape(shape: Sequence[int]) -> str:
    """``shape`` as error messages have it."""
    return " x ".join(map(str, shape))


def _read_kind(file: GgufFile) -> tuple[str, float]:
    metadata = file.metadata
    if metadata.get(TYPE_KEY) != ADAPTER:
        raise FormatError(
            "it is no adapter; --lora takes what convert_lora_to_gguf.py of llama.cpp writes"
        )
    kind = metadata.get_str(KIND_KEY)
    if kind != "lora":
        raise FormatError(f"an adapter of the kind {quote(kind)}, and not LoRA, is not supported")
    if INVOCATION_KEY in metadata:
        raise FormatError(
            "it counts behind certain tokens only (activated LoRA), which is not supported"
        )
    return metadata.get_str("general.architecture"), metadata.get_float(ALPHA_KEY, default=0.0)


def _read_pairs(file: GgufFile) -> dict[str, LoraPair]:
    halves: dict[str, dict[str, TensorInfo]] = {}
    for name, info in file.tensors.items():
        base, suffix = name[: -len(A_SUFFIX)], name[-len(A_SUFFIX) :]
        if suffix not in (A_SUFFIX, B_SUFFIX):
            raise FormatError(
                f"tensor {quote(name)} is not of an adapter; only low-rank updates are supported"
            )
        halves.setdefault(base, {})[suffix] = info
    pairs = {}
    for base, half in halves.items():
        if len(half) != 2:
            (has,) = half
            lacks = B_SUFFIX if has == A_SUFFIX else A_SUFFIX
            raise FormatError(f"tensor {quote(base + lacks)} is missing; fetch the file again")
        pairs[base] = LoraPair(half[A_SUFFIX], half[B_SUFFIX])
    if not pairs:
        raise FormatError("it has no tensors; fetch the file again")
    return pairs

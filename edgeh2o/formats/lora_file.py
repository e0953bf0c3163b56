"""GGUF files of low-rank adapters, as llama.cpp's convert_lora_to_gguf.py writes them.

A matrix of the model, ``blk.0.attn_q.weight``, has two tensors: its name with ``.lora_a``, [rank,
cols], and with ``.lora_b``, [rows, rank]; of a stack of matrices both are stacks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import FormatError
from .gguf import GgufFile, TensorInfo, open_gguf
from .metadata import quote

TYPE_KEY, KIND_KEY, ALPHA_KEY = "general.type", "adapter.type", "adapter.lora.alpha"
INVOCATION_KEY = "adapter.alora.invocation_tokens"
ADAPTER = "adapter"
A_SUFFIX, B_SUFFIX = ".lora_a", ".lora_b"


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

    def factor(self, pair: LoraPair) -> float:
        """What B A counts (Hu et al. 2021, section 4.1)."""
        return self.alpha / pair.rank if self.alpha else 1.0

    def __enter__(self) -> LoraFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()


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

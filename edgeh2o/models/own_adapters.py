"""Low-rank adapters in a model's own file, which tokens of its texts choose (Granite Switch, 2026).

A matrix has two stacks, ``blk.0.attn_q.lora_a`` and ``.lora_b``, of an A and a B for every adapter,
behind one for none; Q, K and V have their own, also where they are one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from ..errors import FormatError
from ..formats.gguf_header import TensorInfo
from ..formats.lora_file import A_SUFFIX, B_SUFFIX, LowRankPart, read_floats
from ..formats.metadata import Metadata, quote
from .lora import LowRankUpdate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..formats.model_tensors import ModelTensors
    from ..model_config import DecoderConfig
    from .tensors import TensorBinding

MAX_ADAPTERS, MAX_RANK = 256, 2**12
DEFAULT_GAIN = 15.0
_COUNT_KEY, _RANK_KEY, _GAIN_KEY = (
    f"adapters.{name}" for name in ("count", "lora_rank", "router_gain")
)
_ACTIVATE_KEY, _SUBSTITUTE_KEY = (
    f"adapters.token_ids_{name}" for name in ("activate", "substitute")
)
_FLOATS = ("F32", "F16", "BF16")


def own_updates(names: Iterable[str]) -> list[str]:
    """Those of a file's tensors that are of its adapters."""
    return [name for name in names if name.endswith((A_SUFFIX, B_SUFFIX))]


def read_adapters(gguf: ModelTensors, architecture: str, vocab_size: int) -> dict[str, Any]:
    """What ``DecoderConfig`` has of them. Raises ``FormatError`` that names the key."""
    metadata = gguf.metadata
    count, rank, gain, activate, substitute = (
        f"{architecture}.{key}"
        for key in (_COUNT_KEY, _RANK_KEY, _GAIN_KEY, _ACTIVATE_KEY, _SUBSTITUTE_KEY)
    )
    n_adapters = metadata.get_int(count, minimum=1, maximum=MAX_ADAPTERS)
    ids = [_read_ids(metadata, key, n_adapters, vocab_size) for key in (activate, substitute)]
    if len(set(ids[0])) < n_adapters:
        raise FormatError(
            f"metadata key {quote(activate)} names a token twice; the file is damaged"
        )
    return {
        "adapter_tokens": tuple(zip(*ids, strict=True)),
        "adapter_gain": metadata.get_float(gain, default=DEFAULT_GAIN, above=0.0, below=1e3),
        "update_rank": n_adapters * metadata.get_int(rank, minimum=1, maximum=MAX_RANK),
    }


def _read_ids(metadata: Metadata, key: str, n_adapters: int, vocab_size: int) -> list[int]:
    ids: list[int] = metadata.get_array(key, kinds="iu", length=n_adapters).tolist()
    if bad := [token for token in ids if not 0 <= token < vocab_size]:
        raise FormatError(
            f"metadata key {quote(key)} names token {bad[0]}, but the vocabulary has {vocab_size}; "
            "the file is damaged"
        )
    return ids


def bind_own_updates(
    gguf: ModelTensors, config: DecoderConfig, bindings: Sequence[TensorBinding]
) -> list[LowRankUpdate]:
    """What the adapters add to the matrices of ``bindings``.

    Raises FormatError, which names the tensor, for one that is missing, unknown, or of another
    shape or type.
    """
    by_name = {binding.name.removesuffix(".weight"): binding for binding in bindings}
    n_adapters = len(config.adapter_tokens)
    rank = config.update_rank // n_adapters
    updates, known = [], set()
    read = lru_cache(2)(gguf.tensor_bytes)  # for all adapters: both halves of one matrix
    for name, binding in by_name.items():
        if not name.startswith("blk.") or len(binding.info.shape) < 2:
            continue
        n_rows, n_cols = binding.n_rows, binding.info.cols
        shapes = {A_SUFFIX: (n_cols, rank), B_SUFFIX: (rank, n_rows)}
        halves = [
            _check(gguf, name + suffix, (*shape, n_adapters + 1))
            for suffix, shape in shapes.items()
        ]
        known |= {half.name for half in halves}
        for adapter in range(n_adapters):
            first = adapter + 1  # behind that for none
            part = LowRankPart(
                rank,
                1.0,
                partial(_rows, gguf, read, halves[0], first * rank, rank),
                partial(_rows, gguf, read, halves[1], first * n_rows, n_rows),
            )
            updates.append(LowRankUpdate(binding, 0, adapter, part, gguf.path))
    if unknown := [name for name in own_updates(gguf.tensors) if name not in known]:
        raise FormatError(
            f"{gguf.path}: tensor {quote(unknown[0])} is of an adapter of no matrix; the model is "
            "of a variant that is not supported"
        )
    return updates


def _check(gguf: ModelTensors, name: str, shape: tuple[int, ...]) -> TensorInfo:
    info = gguf.tensors.get(name)
    if info is None:
        raise FormatError(
            f"{gguf.path}: tensor {quote(name)} of an adapter is missing; the file is incomplete"
        )
    if info.shape != shape or info.type_name not in _FLOATS:
        raise FormatError(
            f"{gguf.path}: tensor {quote(name)} is {info.type_name} of shape {list(info.shape)}, "
            f"but must be one of {', '.join(_FLOATS)} of shape {list(shape)}"
        )
    return info


def _rows(
    gguf: ModelTensors,
    read: Callable[[TensorInfo], memoryview],
    info: TensorInfo,
    first: int,
    n_rows: int,
) -> NDArray[np.float32]:
    """Rows of a stack, whose matrices lie below each other."""
    row_bytes = info.n_bytes // info.rows
    data = read(info)[first * row_bytes :][: n_rows * row_bytes]
    return read_floats(gguf.path, info.name, data, info.type_name, (n_rows, info.cols))


class OwnAdapters:
    """The adapters of an open file. Raises as ``bind_own_updates``."""

    fingerprints: tuple[str, ...] = ()  # they are of the file

    def __init__(
        self, gguf: ModelTensors, config: DecoderConfig, bindings: Sequence[TensorBinding]
    ) -> None:
        self.updates = bind_own_updates(gguf, config, bindings)
        self.n_bytes = sum(update.n_bytes for update in self.updates)

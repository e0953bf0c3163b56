"""Matrices of random bits in types of files that nothing here can write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeh2o.formats.gguf import open_gguf
from edgeh2o.formats.gguf_header import TensorInfo
from edgeh2o.formats.gguf_types import TENSOR_TYPES, stored_bytes
from edgeh2o.formats.gguf_writer import write_gguf

TYPES = {item.name: item for item in TENSOR_TYPES.values()}
# As files of about two and three bits mix them.
MIXED = {
    **{"ffn_gate": "IQ2_XXS", "ffn_up": "IQ3_XXS", "ffn_down": "IQ2_S", "attn_v": "IQ1_M"},
    **{"attn_q": "IQ2_XS", "attn_k": "IQ4_XS", "attn_output": "IQ3_S", "token_embd": "IQ1_S"},
}


def random_blocks(kind: str, n_values: int, seed: int = 0) -> NDArray[np.uint8]:
    """[blocks, bytes] of any bits, but for scales: f16 of about 1e-3, and no NaN of NVFP4."""
    item = TYPES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n_values // item.block_size, item.block_bytes), np.uint8)
    if kind == "NVFP4":
        blocks[:, :4] &= 0x3F
        return blocks
    # Subnormal ones among them.
    scales = (1e-3 * 0.3 ** rng.integers(0, 9, len(blocks))).astype("<f2")
    set_scales(kind, blocks, scales)
    return blocks


def set_scales(kind: str, blocks: NDArray[np.uint8], scales: NDArray[np.float16]) -> None:
    """Overwrites the f16 scale of every block [blocks, bytes] by one of ``scales`` [blocks]."""
    if kind == "IQ1_M":  # in the upper nibbles of four words, the lowest of the scale first
        nibbles = scales.view("<u2")[:, None] >> np.arange(0, 16, 4, np.uint16) & 0xF
        high = blocks[:, 49::2]
        high[:] = high & 0xF | nibbles.astype(np.uint8) << 4
        return
    place = slice(-2, None) if kind.startswith("TQ") else slice(2)
    blocks[:, place] = scales.view(np.uint8).reshape(-1, 2)


def rewrite(model: Path, out: Path, kinds: Mapping[str, str]) -> Path:
    """The model with random matrices of a type where a name holds one of the keys of ``kinds``."""

    def kind_of(info: TensorInfo) -> str:
        found = (kind for part, kind in kinds.items() if part in info.name)
        return next(found, info.type_name) if len(info.shape) > 1 else info.type_name

    with open_gguf(model) as gguf:
        infos = [
            TensorInfo(name, kind, info.shape, stored_bytes(kind, info.rows * info.cols), 0)
            for name, info in gguf.tensors.items()
            for kind in (kind_of(info),)
        ]

        def read(info: TensorInfo) -> list[bytes]:
            original = gguf.tensors[info.name]
            if info.type_name == original.type_name:
                return [bytes(gguf.tensor_bytes(original))]
            n_values = info.rows * info.cols
            return [random_blocks(info.type_name, n_values, len(info.name)).tobytes()]

        metadata = {key: gguf.metadata.stored(key) for key in gguf.metadata}
        write_gguf(out, metadata, infos, read)  # type: ignore[arg-type]
    return out

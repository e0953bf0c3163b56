"""Adapters of tiny models, and models that they were merged into."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

RANK, ALPHA = 5, 12.0
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def matrices_of(model: Path) -> list[str]:
    """Names of the matrices that adapters are usually made for."""
    recurrent = ("ssm_in", "ssm_out", "ssm_x", "ssm_dt.", "shortconv.in", "shortconv.out")
    kinds = ("attn_", "ffn_", *recurrent)
    return [
        tensor.name
        for tensor in gguf.GGUFReader(model).tensors
        if len(tensor.shape) > 1
        and tensor.name.startswith("blk.")
        and tensor.name.split(".", 2)[2].startswith(kinds)
        and not tensor.name.endswith(("_b.weight", ".bias"))
    ]


def random_pairs(model: Path, names: Mapping[str, int] | list[str], seed: int = 0) -> Pairs:
    """A and B, float32, for the matrices ``names`` of a model; by name with another rank."""
    ranks = names if isinstance(names, Mapping) else dict.fromkeys(names, RANK)
    shapes = {tensor.name: tensor.shape.tolist() for tensor in gguf.GGUFReader(model).tensors}
    rng, pairs = np.random.default_rng(seed), {}
    for name, rank in ranks.items():
        cols, rows, *stack = shapes[name]
        sizes = (*reversed(stack), rank, cols), (*reversed(stack), rows, rank)
        pairs[name] = tuple(0.1 * rng.standard_normal(size).astype(np.float32) for size in sizes)
    return pairs


def write_adapter(
    path: Path,
    pairs: Pairs,
    *,
    architecture: str = "llama",
    alpha: float | None = ALPHA,
    kind: str = "lora",
    general_type: str = "adapter",
    dtype: type = np.float32,
) -> Path:
    """As convert_lora_to_gguf.py of llama.cpp writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(general_type)
    writer.add_string("adapter.type", kind)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in pairs.items():
        writer.add_tensor(f"{name}.lora_a", a.astype(dtype))
        writer.add_tensor(f"{name}.lora_b", b.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merge(model: Path, path: Path, pairs: Pairs, factor: float) -> Path:
    """A copy of an F32 model, in ``path``, with ``factor`` B A added to its matrices."""
    path.write_bytes(model.read_bytes())
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name in pairs:
            a, b = (half.astype(np.float64) for half in pairs[tensor.name])
            tensor.data[:] = tensor.data + factor * (b @ a)
    return path

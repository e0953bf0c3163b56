"""Biases of keys: which models have some, and in which layers they are too large for 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..model_config import DecoderConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..formats.model_tensors import ModelTensors
    from .tensors import TensorBinding

# Logits that the biases of queries and keys make, less the mean key of a block, which products in 8
# bits take off. Qwen2.5-Coder-0.5B has 547 in its first layer and 18 at most in the others.
LARGE_LOGIT = 64.0
BLOCK_KEYS = 64  # kLevelKeys of cpp/kernels/attention_tile.h
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def mark_key_biases(
    config: DecoderConfig, gguf: ModelTensors, bindings: Sequence[TensorBinding]
) -> DecoderConfig:
    """``config`` with ``has_key_bias``, and ``has_large_keys`` of its layers, as the file has."""
    biases = {
        item.name: item for item in bindings if item.name.endswith(("attn_k.bias", "attn_qkv.bias"))
    }
    if not biases:
        return config
    biases |= {item.name: item for item in bindings if item.name.endswith("attn_q.bias")}
    layers = tuple(
        replace(layer, has_large_keys=_largest_logit(config, index, gguf, biases) > LARGE_LOGIT)
        for index, layer in enumerate(config.layers)
    )
    return replace(config, has_key_bias=True, layers=layers)


def _largest_logit(
    config: DecoderConfig, index: int, gguf: ModelTensors, biases: dict[str, TensorBinding]
) -> float:
    """Of a layer's KV heads: the norms of the biases of its queries and keys, as logits.

    A rotated bias b differs from its mean over a block of n keys by |b|^2 (1 - sinc^2(n w / 2)) for
    every pair of dimensions that turns by w per position: slow ones hardly do.
    """
    import numpy as np

    layer = config.layers[index]
    dim, n_heads, n_kv_heads = config.head_dim_of(layer), layer.n_heads, layer.n_kv_heads
    names = {part: f"blk.{config.own_layer(index)}.attn_{part}.bias" for part in ("q", "k", "qkv")}
    if names["qkv"] in biases:
        joint = _read(gguf, biases[names["qkv"]])
        q = joint[-(n_heads + 2 * n_kv_heads) * dim :][: n_heads * dim]
        k = joint[-2 * n_kv_heads * dim :][: n_kv_heads * dim]
    elif names["q"] in biases and names["k"] in biases:
        q = _read(gguf, biases[names["q"]])[-n_heads * dim :]
        k = _read(gguf, biases[names["k"]])
    else:
        return 0.0
    turns = np.array(config.rope_inv_freq[: dim // 2]) * (layer.has_rope * BLOCK_KEYS / 2 / np.pi)
    left = np.zeros(dim)
    left[: 2 * len(turns)] = np.tile(1 - np.sinc(turns) ** 2, 2)
    of_queries = np.square(q).reshape(n_kv_heads, -1, dim).sum(axis=2).mean(axis=1)
    of_keys = (np.square(k).reshape(n_kv_heads, dim) * left).sum(axis=1)
    return config.attention_scale * float(np.sqrt((of_queries * of_keys).max()))


def _read(gguf: ModelTensors, binding: TensorBinding) -> NDArray[Any]:
    """A bias as the core has it; zeros where it is of a type that they are not written in."""
    import numpy as np

    info = binding.info
    if info.type_name not in _DTYPES:
        return np.zeros(info.cols)
    values = np.frombuffer(gguf.tensor_bytes(info), _DTYPES[info.type_name])
    if info.type_name == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    values = values.astype(np.float64)
    return values if binding.row_order is None else values[np.asarray(binding.row_order)]

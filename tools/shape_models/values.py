"""Random weights in the blocks of a file, and the vectors beside them."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from tools.shape_models.recurrent import FLOAT_MATRICES
from tools.shape_models.shape import Shape
from tools.shape_models.tensor import Tensor
from tools.tiny_models.gemma3n import VECTOR_SUFFIXES
from tools.tiny_models.rope import llama3_factors

WEIGHT_STD = 0.02

Bytes = NDArray[np.uint8]


def _half(value: float) -> Bytes:
    return np.array([value], np.float16).view(np.uint8)


def random_blocks(n_bytes: int, type_name: str, source: np.random.BitGenerator) -> Bytes:
    """Blocks of a quantised type or F16 that decode to weights of mean 0 and std WEIGHT_STD.

    Args:
        n_bytes: a whole number of blocks.

    Returns:
        [blocks, bytes of a block]. Numbers of steps are uniform; the factors of the scales
        below are the standard deviations that they have then.
    """
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    words = source.random_raw((n_bytes + 7) // 8)
    blocks = np.asarray(words).view(np.uint8)[:n_bytes].reshape(-1, block_bytes)
    if type_name == "F16":
        # Any sign and mantissa, one of the two exponents that reach up to 2**-5.
        bits = blocks.view(np.uint16)
        bits &= 0x87FF
        bits |= 8 << 10
    elif type_name == "Q6_K":
        blocks[:, 208:] = _half(WEIGHT_STD / (73.9 * 18.5))
    elif type_name == "Q3_K":
        blocks[:, 108:] = _half(WEIGHT_STD / (18.5 * 2.35))
    elif type_name == "Q2_K":
        # As with Q4_K below.
        blocks[:, :16] = (blocks[:, :16] & 15) * 17
        d = WEIGHT_STD / (8.8 * 1.12)
        blocks[:, 80:82], blocks[:, 82:84] = _half(d), _half(1.5 * d)
    elif type_name == "MXFP4":  # 2.93 times a power of two: 2**-7 and 2**-8, 11 to 5
        blocks[:, 0] = np.where((blocks[:, 0] & 15) < 11, 120, 119)
    elif type_name in ("Q4_K", "Q5_K"):
        # Each sub-block's minimum is its scale, which `dmin` makes the middle of the steps.
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
        middle, std = (7.5, 4.61) if type_name == "Q4_K" else (15.5, 9.23)
        d = WEIGHT_STD / (36.5 * std)
        blocks[:, :2], blocks[:, 2:4] = _half(d), _half(middle * d)
    elif type_name in ("Q4_1", "Q5_1"):
        middle, std = (7.5, 4.61) if type_name == "Q4_1" else (15.5, 9.23)
        d = WEIGHT_STD / std
        blocks[:, :2], blocks[:, 2:4] = _half(d), _half(-middle * d)
    else:
        # Steps are centred at -0.5: a random sign of the scale takes the mean away.
        low, high = _half(WEIGHT_STD / {"Q4_0": 4.63, "Q5_0": 9.25, "Q8_0": 73.9}[type_name])
        blocks[:, 0] = low
        blocks[:, 1] = (blocks[:, 1] & 0x80) | high
    return blocks


def random_values(
    tensor: Tensor, shape: Shape, source: np.random.BitGenerator
) -> Bytes | NDArray[np.float32]:
    """The bytes of a tensor's blocks, or its numbers where they are float32."""
    if tensor.type_name != "F32":
        return random_blocks(tensor.n_bytes, tensor.type_name, source)
    if tensor.name == "rope_freqs.weight" and shape.gemma4 is not None:
        n_pairs = shape.head_dim // 2  # a quarter of them is rotated
        return np.where(np.arange(n_pairs) < n_pairs // 4, 1.0, 1e30).astype(np.float32)
    if tensor.name == "rope_freqs.weight":
        assert shape.rope_factor is not None
        return llama3_factors(
            rope_base=shape.rope_base,
            n_pairs=shape.head_dim // 2,
            trained_context=shape.trained_context,
            factor=shape.rope_factor,
        )
    noise = np.random.Generator(source).normal(scale=0.05, size=tensor.shape)
    if tensor.name.endswith((*VECTOR_SUFFIXES, *FLOAT_MATRICES)):
        return noise.astype(np.float32)
    if tensor.name.endswith(".ssm_a"):  # of the logarithm of what decays
        return (noise - 0.5).astype(np.float32)
    return (noise + (not tensor.name.endswith(".bias"))).astype(np.float32)

"""Packed weights and matrix products of every ISA and tensor type.

Weights are exact after packing: their float32 values equal those that the gguf package decodes.
Products see activations rounded to 8 bits; with these the products agree with float64 to float32
rounding.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from edgeh2o import _core, _kernels
from tests.joined_cases import for_each
from tests.random_blocks import set_scales as set_scattered_scales
from tests.reference.codebook_quants import CODEBOOK_TYPES, quantize_codebook
from tests.reference.k_quants import quantize_k
from tests.reference.quant import Q8_BLOCK, dequantise_q8_rows, quantise_q8_rows

EPS = np.finfo(np.float32).eps
FLOAT_TYPES = ["F32", "F16", "BF16"]
FILE_TYPES = [name for name in _core.supported_types() if name not in FLOAT_TYPES]
# Held in formats of memory alone; bits per weight there, in float16 and bytes for scales.
GRID_TYPES = {
    **dict.fromkeys(("IQ3_S", "IQ3_XXS"), 4 + 8 / 32 + 16 / 256),
    **dict.fromkeys(("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M"), 3 + 8 / 16 + 16 / 256),
    "IQ1_S": 2 + 8 / 32 + 16 / 256,
}
QUANTISED_TYPES = [*FILE_TYPES, *GRID_TYPES]
TYPES = [*FLOAT_TYPES, *QUANTISED_TYPES]


def block_shape(type_name: str) -> tuple[int, int]:
    """(weights, bytes) of one block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]


# Where in a block its float16 scales lie, if not at its start alone.
SCALE_OFFSETS = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def set_scales(type_name: str, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Overwrites every scale of blocks [n, bytes]; MXFP4 takes the exponents of ``scales`` [n]."""
    if type_name == "MXFP4":
        blocks[:, 0] = 127 + np.frexp(scales.astype(np.float64))[1]
        return
    if type_name == "IQ1_M":
        return set_scattered_scales(type_name, blocks, scales.astype("<f2"))
    for offset in SCALE_OFFSETS.get(type_name, (0,)):
        blocks[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)


def random_weights(type_name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Bytes of a tensor whose quants take every value and whose scales are finite."""
    rng = np.random.default_rng(seed)
    values, size = block_shape(type_name)
    blocks = rng.integers(0, 256, (rows * cols // values, size), dtype=np.uint8)
    if type_name == "F32":
        return rng.standard_normal((rows, cols)).astype(np.float32).view(np.uint8).ravel()
    if type_name == "F16":
        return rng.standard_normal((rows, cols)).astype(np.float16).view(np.uint8).ravel()
    if type_name == "BF16":
        bits = rng.standard_normal((rows, cols)).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8).ravel()
    set_scales(type_name, blocks, rng.standard_normal(len(blocks)) * 0.02)
    return blocks.ravel()


def decode(type_name: str, data: np.ndarray, rows: int, cols: int) -> np.ndarray:
    weights = gguf.dequantize(data.reshape(rows, -1), gguf.GGMLQuantizationType[type_name])
    return weights.reshape(rows, cols).astype(np.float32)


def as_seen(isa: str, type_name: str, x: np.ndarray) -> np.ndarray:
    """Activations as the product sees them; what ``quantize_q8`` does is tested by itself."""
    if type_name in FLOAT_TYPES:
        return x.astype(np.float64)
    scales, _, quants = quantised(isa, x, _kernels.scale_block(isa, type_name))
    return dequantise_q8_rows(quants, scales)


def quantised(
    isa: str, x: np.ndarray, scale_block: int = Q8_BLOCK
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What ``quantize_q8`` packs, taken apart, after a look at the starts of dot products.

    Returns scales and sums, float32 [rows, cols / 32], and quants, int8 [rows, cols].
    """
    packed, dot_bias, has_pairs = _kernels.quantize_q8(isa, x, scale_block)
    n_tiles, n_blocks, mr = *packed.shape[:2], packed.shape[2] // 56
    n_rows = n_tiles * mr
    floats = packed[..., : 8 * mr].copy().view(np.float32).reshape(n_tiles, n_blocks, 2, mr)
    floats = floats.transpose(2, 0, 3, 1).reshape(2, n_rows, n_blocks)[:, : len(x)]
    starts = packed[..., 8 * mr : 24 * mr].copy().view(np.int32).reshape(n_tiles, n_blocks, 4, mr)
    starts = starts.transpose(2, 0, 3, 1).reshape(4, n_rows, n_blocks)[:, : len(x)]
    quants = packed[..., 24 * mr :].view(np.int8).reshape(n_tiles, n_blocks, 8, mr, 4)
    quants = quants.transpose(0, 3, 1, 2, 4).reshape(n_rows, -1)[: len(x)]

    parts = quants.reshape(len(x), n_blocks, 2, 4, 2, 2).sum((3, 5), dtype=np.int32)
    parts = parts.transpose(2, 0, 1, 3)
    halves = parts.sum(3)
    rest = np.array([-128 * halves.sum(0), *(-32 * halves)]) + dot_bias
    if has_pairs:
        pairs = np.array([-16 * parts.sum(0), *(-32 * parts)], np.int16)
        rest = pairs.view(np.int32)[..., 0]
    np.testing.assert_array_equal(starts[0], dot_bias - 8 * halves.sum(0))
    np.testing.assert_array_equal(starts[1:], rest)
    return floats[0], floats[1], quants


def assert_product(result: np.ndarray, x: np.ndarray, weights: np.ndarray) -> None:
    """Equal to x times weights^T within the rounding of a float32 sum (1-norm of the products)."""
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    norm = np.abs(x) @ np.abs(weights).T
    assert np.all(np.abs(result - x @ weights.T) <= 16 * EPS * norm)


@pytest.mark.parametrize("type_name", TYPES)
@for_each("rows", [1, 7, 31, 33, 70])
def test_packing_keeps_every_weight(isa: str, type_name: str, rows: int) -> None:
    data = random_weights(type_name, rows, 768, seed=rows)
    weights = _kernels.Weights(isa, type_name, data, rows, 768)
    np.testing.assert_array_equal(weights.dequantize(), decode(type_name, data, rows, 768))


def test_every_shared_exponent_is_exact(isa: str) -> None:
    """A scale of MXFP4 is 2^(e - 128), denormal at the lower end; the largest products overflow."""
    blocks = np.random.default_rng(9).integers(0, 256, (256, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:9] = np.arange(8) * 0x22 + 0x10  # every value, in ascending nibbles
    weights = _kernels.Weights(isa, "MXFP4", blocks.ravel(), 256, 32).dequantize()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(weights, decode("MXFP4", blocks.ravel(), 256, 32))
    assert weights[0].any() and np.isfinite(weights[:253]).all()


@pytest.mark.parametrize("type_name", TYPES)
@for_each("n_rows", [1, 2, 5, 6, 13, 33])
def test_product(isa: str, type_name: str, n_rows: int) -> None:
    rows, cols = 45, 1024 + 256  # partial last panel; more than one block of depth
    data = random_weights(type_name, rows, cols)
    x = np.random.default_rng(1).standard_normal((n_rows, cols)).astype(np.float32)
    x[0, :32] = 0  # a block without a scale
    result = _kernels.Weights(isa, type_name, data, rows, cols).matmul(x)
    assert_product(result, as_seen(isa, type_name, x), decode(type_name, data, rows, cols))


@pytest.mark.parametrize("type_name", TYPES)
def test_a_row_does_not_depend_on_the_others(isa: str, type_name: str) -> None:
    """Bit by bit, over the kernels for one row, a few and many, and over blocks of depth."""
    rows, cols = 45, 1024 + 256
    weights = _kernels.Weights(isa, type_name, random_weights(type_name, rows, cols), rows, cols)
    rng = np.random.default_rng(12)
    x = rng.standard_normal((40, cols)).astype(np.float32)
    bias, residual = (rng.standard_normal((n, rows)).astype(np.float32) for n in (1, 40))
    alone = [weights.matmul(x[i : i + 1], bias[0], residual[i : i + 1])[0] for i in range(40)]
    for n_rows in [*range(2, 18), 40]:
        together = weights.matmul(x[:n_rows], bias[0], residual[:n_rows])
        np.testing.assert_array_equal(together, alone[:n_rows])


@pytest.mark.parametrize("type_name", FILE_TYPES)
def test_packed_weights_take_what_the_file_takes(isa: str, type_name: str) -> None:
    rows, cols = 64, 2048
    data = random_weights(type_name, rows, cols)
    packed = _kernels.Weights(isa, type_name, data, rows, cols)
    assert packed.n_bytes <= 1.06 * data.nbytes


@pytest.mark.parametrize("type_name", GRID_TYPES)
def test_weights_from_grids_take_few_bits(isa: str, type_name: str) -> None:
    rows, cols = 64, 2048
    data = random_weights(type_name, rows, cols)
    packed = _kernels.Weights(isa, type_name, data, rows, cols)
    assert packed.n_bytes == rows * cols * GRID_TYPES[type_name] / 8
    values, size = _core.widened_types()[type_name]
    assert 8 * size / values == GRID_TYPES[type_name]


@pytest.mark.parametrize("type_name", QUANTISED_TYPES)
@for_each("n_blocks", [1, 2, 3, 7, 9, 25])
def test_product_of_every_depth(isa: str, type_name: str, n_blocks: int) -> None:
    cols, rows = n_blocks * block_shape(type_name)[0], 40
    data = random_weights(type_name, rows, cols, seed=n_blocks)
    x = np.random.default_rng(2).standard_normal((3, cols)).astype(np.float32)
    weights = _kernels.Weights(isa, type_name, data, rows, cols)
    for part in (x, x[:1]):
        assert_product(
            weights.matmul(part), as_seen(isa, type_name, part), decode(type_name, data, rows, cols)
        )


@pytest.mark.parametrize("depth", [1, 3, 31, 100, 257])
def test_float_product_of_odd_depth(isa: str, depth: int) -> None:
    data = random_weights("F32", 37, depth)
    x = np.random.default_rng(3).standard_normal((9, depth)).astype(np.float32)
    weights = _kernels.Weights(isa, "F32", data, 37, depth)
    assert_product(weights.matmul(x), x, decode("F32", data, 37, depth))
    assert_product(weights.matmul(x[:1]), x[:1], decode("F32", data, 37, depth))


@pytest.mark.parametrize("type_name", QUANTISED_TYPES)
@for_each("fill", [0x00, 0xFF, 0x80, 0x7F])
def test_extreme_quants_do_not_saturate(isa: str, type_name: str, fill: int) -> None:
    rows, cols = 33, 512
    values, size = block_shape(type_name)
    blocks = np.full((rows * cols // values, size), fill, np.uint8)
    set_scales(type_name, blocks, np.full(len(blocks), 0.5))
    data = blocks.ravel()
    for sign in (1, -1):
        x = np.full((7, cols), sign, np.float32)  # quantised to +-127 everywhere
        result = _kernels.Weights(isa, type_name, data, rows, cols).matmul(x)
        assert_product(result, as_seen(isa, type_name, x), decode(type_name, data, rows, cols))


def test_bias_and_sum(isa: str) -> None:
    data = random_weights("Q8_0", 40, 64)
    rng = np.random.default_rng(4)
    x, residual = (rng.standard_normal((5, n)).astype(np.float32) for n in (64, 40))
    bias = rng.standard_normal(40).astype(np.float32)
    weights = _kernels.Weights(isa, "Q8_0", data, 40, 64)
    plain = weights.matmul(x)
    np.testing.assert_array_equal(weights.matmul(x, bias), plain + bias)
    np.testing.assert_allclose(
        weights.matmul(x, bias, residual), plain + residual + bias, 1e-5, 1e-5
    )
    np.testing.assert_allclose(
        weights.matmul(x[:1], None, residual[:1]), weights.matmul(x[:1]) + residual[:1], 1e-6, 1e-6
    )


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_threads_do_not_change_bits(isa: str, n_threads: int) -> None:
    data = random_weights("Q4_0", 200, 256)
    x = np.random.default_rng(5).standard_normal((300, 256)).astype(np.float32)
    weights = _kernels.Weights(isa, "Q4_0", data, 200, 256)
    before = _core.num_threads()
    try:
        expected = weights.matmul(x)
        _core.set_num_threads(n_threads)
        np.testing.assert_array_equal(weights.matmul(x), expected)
    finally:
        _core.set_num_threads(before)


@pytest.mark.parametrize(
    ("type_name", "error"),
    [
        *[("Q2_K", 0.35), ("Q3_K", 0.25), ("Q4_K", 0.08), ("Q5_K", 0.08), ("Q6_K", 0.08)],
        *[("IQ4_NL", 0.1), ("IQ4_XS", 0.1)],
    ],
)
def test_blocks_of_a_real_encoder(isa: str, type_name: str, error: float) -> None:
    weights = np.random.default_rng(6).standard_normal((33, 512)).astype(np.float32)
    encode = quantize_codebook if type_name in CODEBOOK_TYPES else quantize_k
    data = encode(weights, type_name)
    packed = _kernels.Weights(isa, type_name, data.view(np.uint8).ravel(), 33, 512).dequantize()
    assert np.sqrt(np.mean((packed - weights) ** 2)) < error


def test_quantised_activations(isa: str) -> None:
    x = np.random.default_rng(7).standard_normal((13, 96)).astype(np.float32)
    x[3] = 0
    x[4, 5] = 1000
    scales, sums, quants = quantised(isa, x)
    expected_quants, expected_scales = quantise_q8_rows(x)
    np.testing.assert_allclose(scales, expected_scales, rtol=2 * EPS)
    # A value on a rounding border may go either way.
    difference = quants.astype(int) - expected_quants.reshape(quants.shape)
    assert np.abs(difference).max() <= 1 and np.count_nonzero(difference) <= 2
    totals = quants.reshape(13, 3, 32).sum(2, dtype=np.float32)
    np.testing.assert_allclose(sums, scales * totals, rtol=2 * EPS)


def test_activations_that_share_a_scale_by_256(isa: str) -> None:
    """16 neighbours of equal size get smaller numbers, so that their products fit 16 bits."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((13, 768)).astype(np.float32)
    x[3, 256:512] = 0
    x[4, 5] = 1000
    x[5, 512:528] = -2.5
    x[6] = np.where(rng.random(768) < 0.5, -1, 1)
    scales, _, quants = quantised(isa, x, 256)
    expected_quants, expected_scales = quantise_q8_rows(x, 256)
    np.testing.assert_allclose(scales, expected_scales, rtol=16 * EPS)
    difference = quants.astype(int) - expected_quants
    assert np.abs(difference).max() <= 1 and np.count_nonzero(difference) <= 4
    sums = np.abs(quants.astype(int)).reshape(13, -1, 16).sum(2)
    assert 1000 < sums.max() <= 1023


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (12, 64, 32), (13, 65, 33), (6, 7, 100), (97, 64, 257)]
)
def test_float_gemm(isa: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    a, b = a.astype(np.float32), b.astype(np.float32)
    assert_product(_kernels.gemm_f32(isa, a, b), a, b.T)


def test_sizes_that_do_not_fit_are_refused(isa: str) -> None:
    data = random_weights("Q4_0", 4, 64)
    with pytest.raises(ValueError, match="take 144 bytes, got 143"):
        _kernels.Weights(isa, "Q4_0", data[:-1], 4, 64)
    with pytest.raises(ValueError, match="not whole Q4_0 blocks"):
        _kernels.Weights(isa, "Q4_0", data, 4, 48)
    with pytest.raises(ValueError, match="Q8_1 is not supported; supported: F32"):
        _kernels.Weights(isa, "Q8_1", data, 4, 64)
    weights = _kernels.Weights(isa, "Q4_0", data, 4, 64)
    with pytest.raises(ValueError, match="depth 64"):
        weights.matmul(np.zeros((2, 32), np.float32))
    with pytest.raises(ValueError, match="available: scalar"):
        _kernels.layout("sse9")

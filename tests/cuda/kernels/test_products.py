"""Products with weights, and rows of tables, on the host device against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.cuda.packing import (
    ORDERS,
    put_floats,
    put_quantised,
    put_tiles,
    random_tiles,
)
from tools.cuda_driver import (
    ARGUMENTS,
    FORMATS,
    TALL_FORMATS,
    Device,
    Embed,
    Further,
    Multiply,
    Quantised,
    gemm_shared_bytes,
    multiply_threads,
)


@pytest.mark.parametrize("kernel", ARGUMENTS)
def test_the_structures_of_the_tests_are_those_of_the_kernels(device: Device, kernel: str) -> None:
    if not device.is_emulated:
        pytest.skip("a real driver does not tell")
    assert device.argument_bytes(kernel) == ctypes.sizeof(ARGUMENTS[kernel])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "depth"), [(16, 64), (37, 96), (5, 352)])
def test_multiply(device: Device, name: str, rows: int, depth: int) -> None:
    random = np.random.default_rng(rows)
    x = random.normal(size=(2, depth)).astype(np.float32)
    bias = random.normal(size=rows).astype(np.float32)
    before = random.normal(size=(2, rows + 3)).astype(np.float32)
    is_quantised = name.startswith("q")
    if is_quantised:
        tiles = random_tiles(name, rows, depth, seed=depth)
        matrix, weights, span = put_tiles(device, tiles), tiles.weights(), tiles.span()
        rounded, values = put_quantised(device, x)
        grid = (-(-rows // 16), 2)
    else:
        matrix, weights = put_floats(device, name, random.normal(size=(rows, depth)))
        rounded, values, span = Quantised(), x.astype(np.float64), np.abs(weights)
        grid = (-(-rows // 4), 2)
    for accumulates in (0, 1):
        expected = values @ weights.T + bias
        if accumulates:
            expected += before[:, :rows]
        results = []
        for _ in range(ORDERS):
            out = device.put(before)
            arguments = Multiply(
                w=matrix, x=device.put(x), xq=rounded, bias=device.put(bias), out=out,
                x_stride=depth, out_stride=rows + 3, accumulates=accumulates,
            )  # fmt: skip
            device.launch(f"multiply_{name}", arguments, grid, multiply_threads(name), 512)
            results.append(device.get(out, (2, rows + 3), np.float32))
        size = np.abs(values) @ span.T + np.abs(expected)
        assert (np.abs(results[0][:, :rows] - expected) <= 1e-6 * size).all()
        np.testing.assert_array_equal(results[0][:, rows:], before[:, rows:])
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_per_head(device: Device, name: str) -> None:
    """Heads take parts of rows, that lie apart, and give parts that lie apart."""
    random = np.random.default_rng(9)
    n_heads, n_rows, n_out, depth, step, out_step = 3, 2, 21, 96, 112, 30
    x = random.normal(size=(n_rows, n_heads, step)).astype(np.float32)
    before = random.normal(size=(n_rows, n_heads, out_step)).astype(np.float32)
    matrices, expected, bounds = [], before.astype(np.float64), np.zeros(before.shape)
    is_quantised = name.startswith("q")
    rounded, values = Quantised(), x[..., :depth].astype(np.float64)
    if is_quantised:
        rounded, rows = put_quantised(device, x[..., :depth].reshape(-1, depth))
        values = rows.reshape(values.shape)
        rounded.padded = n_heads * 128  # of a row, whose heads lie one behind the other
    for head in range(n_heads):
        if is_quantised:
            tiles = random_tiles(name, n_out, depth, seed=head)
            matrix, weights, span = put_tiles(device, tiles), tiles.weights(), tiles.span()
        else:
            matrix, weights = put_floats(device, name, random.normal(size=(n_out, depth)))
            span = np.abs(weights)
        matrices.append(matrix)
        expected[:, head, :n_out] = values[:, head] @ weights.T
        bounds[:, head, :n_out] = np.abs(values[:, head]) @ span.T
    out = device.put(before)
    arguments = Multiply(
        w=matrices[0], x=device.put(x), xq=rounded, out=out, x_stride=n_heads * step,
        out_stride=n_heads * out_step, n_rows=n_rows, out_step=out_step,
        heads=device.put(np.frombuffer(b"".join(map(bytes, matrices)), np.uint8)),
        x_step=128 if is_quantised else step,
    )  # fmt: skip
    grid = (-(-n_out // (16 if is_quantised else 4)), n_rows, n_heads)
    device.launch(f"multiply_{name}", arguments, grid, multiply_threads(name), 512)
    got = device.get(out, before.shape, np.float32)
    assert (np.abs(got - expected) <= 1e-6 * (bounds + np.abs(expected))).all()
    np.testing.assert_array_equal(got[..., n_out:], before[..., n_out:])


@pytest.mark.parametrize("name", ["q4", "q8_min"])
def test_a_vector_by_several_matrices(device: Device, name: str) -> None:
    random = np.random.default_rng(5)
    depth, sizes, n_rows = 192, (37, 16, 40), 2
    x = random.normal(size=(n_rows, depth)).astype(np.float32)
    rounded, values = put_quantised(device, x)
    tiles = [random_tiles(name, n, depth, seed=n) for n in sizes]
    matrices = [put_tiles(device, each) for each in tiles]
    biases = [random.normal(size=n).astype(np.float32) for n in sizes]
    width = sum(sizes)
    out = device.put(np.full((n_rows, width), np.nan, np.float32))
    starts = [out + 4 * sum(sizes[:i]) for i in range(3)]
    further = [
        Further(w=matrices[i], bias=device.put(biases[i]), out=starts[i], first_panel=first)
        for i, first in ((1, 3), (2, 4))
    ]
    arguments = Multiply(
        w=matrices[0], xq=rounded, bias=device.put(biases[0]), out=out, out_stride=width,
        further=(Further * 2)(*further), n_further=2,
    )  # fmt: skip
    device.launch(f"multiply_{name}", arguments, (7, n_rows), multiply_threads(name), 512)
    got = device.get(out, (n_rows, width), np.float32)
    for i, n in enumerate(sizes):
        ours = got[:, sum(sizes[:i]) :][:, :n]
        expected = values @ tiles[i].weights().T + biases[i]
        size = np.abs(values) @ tiles[i].span().T + np.abs(expected)
        assert (np.abs(ours - expected) <= 1e-6 * size).all()


@pytest.mark.parametrize(
    ("name", "kernel", "block_rows"),
    [
        *((name, "gemm", 64) for name in FORMATS if name.startswith("q")),
        *((name, "gemm_tall", 128) for name in TALL_FORMATS),
    ],
)
@pytest.mark.parametrize(("n_rows", "n_out", "depth"), [(64, 64, 64), (5, 37, 288), (140, 72, 192)])
def test_gemm(
    device: Device, name: str, n_rows: int, n_out: int, depth: int, kernel: str, block_rows: int
) -> None:
    random = np.random.default_rng(n_rows)
    x = random.normal(size=(n_rows, depth)).astype(np.float32)
    bias = random.normal(size=n_out).astype(np.float32)
    before = random.normal(size=(n_rows, n_out + 3)).astype(np.float32)
    tiles = random_tiles(name, n_out, depth, seed=depth)
    matrix = put_tiles(device, tiles)
    rounded, values = put_quantised(device, x)
    expected = values @ tiles.weights().T + bias + before[:, :n_out]
    results = []
    for _ in range(ORDERS if n_rows == 5 else 1):
        out = device.put(before)
        arguments = Multiply(
            w=matrix, xq=rounded, bias=device.put(bias), out=out, out_stride=n_out + 3,
            accumulates=1, n_rows=n_rows,
        )  # fmt: skip
        grid = (-(-n_out // 64), -(-n_rows // block_rows))
        shared = gemm_shared_bytes(name, block_rows)
        device.launch(f"{kernel}_{name}", arguments, grid, shared=shared)
        results.append(device.get(out, before.shape, np.float32))
    size = np.abs(values) @ tiles.span().T + np.abs(expected)
    assert (np.abs(results[0][:, :n_out] - expected) <= 1e-6 * size).all()
    np.testing.assert_array_equal(results[0][:, n_out:], before[:, n_out:])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("name", FORMATS)
def test_embed_columns_of_a_table_in_parts(device: Device, name: str) -> None:
    part_rows, n_rows, depth, first, n_columns = 17, 40, 192, 96, 32
    matrices, weights = [], []
    for n in (part_rows, part_rows, n_rows - 2 * part_rows):
        if name.startswith("q"):
            tiles = random_tiles(name, n, depth)
            matrices.append(put_tiles(device, tiles))
            weights.append(tiles.weights())
        else:
            values = np.random.default_rng(n).normal(size=(n, depth))
            matrix, rounded = put_floats(device, name, values)
            matrices.append(matrix)
            weights.append(rounded)
    parts = np.frombuffer(b"".join(map(bytes, matrices)), np.uint8)
    tokens = np.array([0, 16, 17, 33, 34, 39], np.int32)
    out = device.empty(len(tokens) * n_columns * 4)
    arguments = Embed(
        parts=device.put(parts), tokens=device.put(tokens), out=out, part_rows=part_rows,
        first=first, n_columns=n_columns, scale=3.0,
    )  # fmt: skip
    device.launch("embed_rows", arguments, (len(tokens),))
    got = device.get(out, (len(tokens), n_columns), np.float32)
    expected = np.concatenate(weights)[tokens, first : first + n_columns] * 3.0
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-5)

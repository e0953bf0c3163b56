"""What fraction of the roofline each kernel for GPUs reaches, as a Markdown table.

    python -m bench.cuda_roofline [--library libcuda.so.1] [--small] [--peaks FILE.ptx]
    python -m bench.cuda_roofline --write-peaks FILE.ptx

Bytes and operations are counted from the sizes: every operand is read once and every result written
once. The limits are measured on the device: a copy, loops of products on tensor cores (IMMA, HMMA)
and one of fused multiply-adds (bench/cuda_peaks.cu, compiled by an NVRTC that is found, or PTX that
--write-peaks made elsewhere). On the host device (--small) no time means anything; it shows that
the script runs.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.build_cuda_images import CompileError, find_nvrtc
from tools.cuda_driver import (
    COMBINE_SHARED_BYTES,
    FORMATS,
    MEAN_SHARED_BYTES,
    SSD_SHARED_BYTES,
    TALL_FORMATS,
    Add,
    Attend,
    AttendTiles,
    Cache,
    Columns,
    Combine,
    Convolve,
    Delta,
    Device,
    Gate,
    Heads,
    KeyList,
    Latent,
    ListedRows,
    Matrix,
    Means,
    Multiply,
    Norm,
    Quantised,
    Rope,
    Ssd,
    Structure,
    attend_shared_bytes,
    attend_tiles_bytes,
    column_parts,
    column_tiles_bytes,
    gemm_shared_bytes,
    multiply_threads,
    tile_dim,
)

SOURCE = Path(__file__).with_name("cuda_peaks.cu")
# Of a measurement: launches are repeated until they take as long.
LEAST_SECONDS = 0.05
LEAST_ROUNDS = 3


class CopyArguments(ctypes.Structure):
    _fields_ = (("to", c_void_p), ("source", c_void_p), ("n", c_uint64))


class LoopArguments(ctypes.Structure):
    _fields_ = (("out", c_void_p), ("n", c_uint32))


@dataclass(frozen=True, slots=True)
class Case:
    """A launch, and what it must move and compute at least.

    Attributes:
        limit: "bytes", "s8", "f16" or "f32": what bounds the kernel.
        amount: bytes, or multiplications and additions.
    """

    name: str
    limit: str
    amount: float
    launch: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Those of a model of 8 billion parameters, or very small ones."""

    dim: int
    n_out: int  # of a matrix by a vector: large enough that caches do not hold it
    ffn_dim: int
    n_rows: int  # of matrix products
    n_single: int  # of what is done row by row
    context: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    copy_bytes: int
    loop: int


LARGE = Sizes(4096, 65536, 14336, 2048, 4096, 16384, 32, 8, 128, 2**30, 4096)
SMALL = Sizes(128, 64, 128, 64, 8, 192, 4, 2, 32, 4096, 2)


def seconds_of(device: Device, launch: Callable[[], None]) -> float:
    """Of one launch, behind one that is not counted."""
    launch()
    device.wait()
    n = LEAST_ROUNDS
    while True:
        started = time.perf_counter()
        for _ in range(n):
            launch()
        device.wait()
        elapsed = time.perf_counter() - started
        if elapsed >= LEAST_SECONDS or device.is_emulated:
            return elapsed / n
        n *= 4


def peaks_ptx(given: Path | None) -> bytes | None:
    """The kernels of bench/cuda_peaks.cu, None where nothing can compile them."""
    if given is not None:
        return given.read_bytes()
    for library in find_nvrtc().values():
        try:
            return library.compile("compute_80", SOURCE).code
        except CompileError as error:
            print(f"the kernels of peaks do not compile: {error}", file=sys.stderr)
    return None


def measure_peaks(device: Device, sizes: Sizes, ptx: bytes | None) -> dict[str, float]:
    """Bytes and operations a second; only what the device has kernels of."""
    if ptx is None or device.is_emulated:
        return {}
    kernels = device.load(ptx)
    n_processors = device.attribute(16)
    to, source = (device.empty(sizes.copy_bytes) for _ in range(2))
    out = device.empty(4096)
    copied = CopyArguments(to=to, source=source, n=sizes.copy_bytes // 16)
    looped = LoopArguments(out=out, n=sizes.loop)
    n_blocks, threads = 8 * n_processors, 256

    def rate(kernel: str, arguments: ctypes.Structure, amount: float) -> float:
        def launch() -> None:
            device.launch_of(kernels, kernel, arguments, (n_blocks,), threads)

        return amount / seconds_of(device, launch)

    n_warps = n_blocks * threads // 32
    peaks = {
        "bytes": rate("peak_copy", copied, 2 * sizes.copy_bytes),
        "s8": rate("peak_mma_s8", looped, n_warps * sizes.loop * 8 * 2 * 16 * 8 * 32),
        "f16": rate("peak_mma_f16", looped, n_warps * sizes.loop * 8 * 2 * 16 * 8 * 16),
        "f32": rate("peak_fma_f32", looped, n_blocks * threads * sizes.loop * 16 * 2),
    }
    for address in (to, source, out):
        device.free(address)
    return peaks


def put_matrix(device: Device, name: str, n_out: int, depth: int) -> tuple[Structure, int]:
    """Weights of any values in a format, and their bytes. Shapes are multiples of 64."""
    random = np.random.default_rng(0)
    shape = {"n_out": n_out, "depth": depth, "format": FORMATS.index(name)}
    if not name.startswith("q"):
        values = np.full(n_out * depth, 0.5, np.float32 if name == "f32" else np.float16)
        return Matrix(values=device.put(values), **shape), values.nbytes
    n_tiles = n_out // 16 * (depth // 64)
    values = random.integers(0, 256, n_tiles * 128 * int(name[1]), np.uint8)
    blocks = (4 if "small" in name else 2) * (2 if name.endswith("min") else 1)
    scales = np.full(n_tiles * 16 * blocks, 0.01, np.float16)
    factors = np.ones(n_out, np.float32)
    matrix = Matrix(
        values=device.put(values), scales=device.put(scales), row_factors=device.put(factors),
        n_tiles=depth // 64, **shape,
    )  # fmt: skip
    return matrix, values.nbytes + scales.nbytes + factors.nbytes


def put_rows(device: Device, n_rows: int, depth: int) -> tuple[Structure, int]:
    """Activations in 8 bits, and their bytes."""
    q = np.random.default_rng(1).integers(-127, 128, (n_rows, depth), np.int8)
    d = np.full((n_rows, depth // 32), 0.01, np.float32)
    return Quantised(q=device.put(q), d=device.put(d), padded=depth), q.nbytes + d.nbytes


def products(device: Device, sizes: Sizes) -> Iterator[Case]:
    """Matrices by a vector, bound by memory, and by many rows, bound by tensor cores."""
    for name in FORMATS:
        is_quantised = name.startswith("q")
        n_out = sizes.n_out if is_quantised else sizes.n_out // 4
        matrix, n_bytes = put_matrix(device, name, n_out, sizes.dim)
        rows, row_bytes = put_rows(device, 1, sizes.dim)
        x, out = device.empty(sizes.dim * 4), device.empty(n_out * 4)
        grid = (n_out // (16 if is_quantised else 4), 1)
        arguments = Multiply(
            w=matrix, x=x, xq=rows, out=out, x_stride=sizes.dim, out_stride=n_out, n_rows=1
        )

        def multiply(
            kernel: str = f"multiply_{name}",
            a: Structure = arguments,
            grid: tuple[int, ...] = grid,
            threads: int = multiply_threads(name),
        ) -> None:
            device.launch(kernel, a, grid, threads, 512)

        moved = n_bytes + row_bytes + n_out * 4
        yield Case(f"multiply_{name}", "bytes", moved, multiply)
        device.free_all()
    for name in (name for name in FORMATS if name.startswith("q")):
        matrix, _ = put_matrix(device, name, sizes.dim, sizes.dim)
        rows, _ = put_rows(device, sizes.n_rows, sizes.dim)
        out = device.empty(sizes.n_rows * sizes.dim * 4)
        arguments = Multiply(w=matrix, xq=rows, out=out, out_stride=sizes.dim, n_rows=sizes.n_rows)
        for kernel, block_rows in (("gemm", 64), ("gemm_tall", 128)):
            if kernel == "gemm_tall" and name not in TALL_FORMATS:
                continue
            grid = (sizes.dim // 64, -(-sizes.n_rows // block_rows))

            def gemm(
                kernel: str = f"{kernel}_{name}",
                a: Structure = arguments,
                grid: tuple[int, ...] = grid,
                shared: int = gemm_shared_bytes(name, block_rows),
            ) -> None:
                device.launch(kernel, a, grid, shared=shared)

            yield Case(f"{kernel}_{name}", "s8", 2.0 * sizes.n_rows * sizes.dim**2, gemm)
        device.free_all()


def attending(
    device: Device, shared: Mapping[str, Any], n_rows: int, context: int, block_heads: int
) -> Callable[[int], Callable[[], None]]:
    """Makes launches that attend to the whole context, of the first of so many rows."""
    heads = shared["heads"]
    n_heads, n_kv, value_dim = heads.n_heads, heads.n_kv_heads, heads.value_dim
    n_splits = -(-context // 128)
    n_parts = n_rows * n_heads * n_splits
    parts, states = device.empty(n_parts * value_dim * 4), device.empty(n_parts * 8)
    combine = Combine(
        parts=parts, states=states, out=device.empty(n_rows * n_heads * value_dim * 4),
        n_heads=n_heads, value_dim=value_dim, n_splits=n_splits,
    )  # fmt: skip
    n_blocks = n_kv * -(-n_heads // n_kv // block_heads)
    n_bytes = attend_shared_bytes(block_heads, heads.key_dim)

    def attend(n: int) -> Callable[[], None]:
        arguments = Attend(
            **shared, parts=parts, states=states, first=context - n, n_splits=n_splits,
            keys=KeyList(), block_heads=block_heads,
        )  # fmt: skip

        def launch() -> None:
            device.launch("attend_split", arguments, (n_splits, n_blocks, n), shared=n_bytes)
            device.launch("combine_splits", combine, (n_heads, n), shared=COMBINE_SHARED_BYTES)

        return launch

    return attend


def attention(device: Device, sizes: Sizes) -> Iterator[Case]:
    """A token and some rows of a prompt over a cache in f16, and column sums of those rows."""
    dim, n_heads, n_kv = sizes.head_dim, sizes.n_heads, sizes.n_kv_heads
    n_rows, n_summed, context = 8, 32, sizes.context
    stride = (n_heads + 2 * n_kv) * dim
    heads = Heads(n_heads=n_heads, n_kv_heads=n_kv, key_dim=dim, value_dim=dim, value_stride=dim)
    qkv = device.put(np.full((n_summed, stride), 0.1, np.float32))
    k, v = (device.put(np.full((n_kv, context, dim), 0.1, np.float16)) for _ in range(2))
    shared = {
        "qkv": qkv, "cache": Cache(k=k, v=v, max_context=context), "heads": heads,
        "stride": stride, "scale": 0.1,
    }  # fmt: skip
    attend = attending(device, shared, n_rows, context, n_heads // n_kv)
    yield Case("attention of a token", "bytes", 2.0 * n_kv * context * dim * 2, attend(1))
    yield Case(
        "attention of 8 rows of a prompt", "f32", 4.0 * n_rows * n_heads * context * dim,
        attend(n_rows),
    )  # fmt: skip
    joined = device.put(np.ones((n_summed, n_heads, 2), np.float32))
    counts = device.put(np.full(n_kv, context, np.uint32))
    sums = Columns(
        **shared, states=joined, sums=device.empty(n_kv * context * 4), n_rows=n_summed,
        keys=KeyList(counts=counts), sums_stride=context,
    )  # fmt: skip

    def add_columns() -> None:
        device.launch("column_sums", sums, (-(-context // 4), n_kv))

    yield Case("column_sums", "f32", 2.0 * n_summed * n_heads * context * dim, add_columns)

    # Half of every page of 64 positions is listed: rows that stand for the other half.
    n_pages = context // 64
    listed = np.tile(np.arange(0, 64 * n_pages, 2, dtype=np.int32), (n_kv, 1))
    pages = np.tile(
        np.stack([64 * np.arange(n_pages), 64 * np.arange(1, n_pages + 1)], 1), (n_kv, 1)
    )
    means = Means(
        cache=shared["cache"], heads=heads, n_rows=n_pages,
        keys=KeyList(
            positions=device.put(listed), stride=listed.shape[1],
            counts=device.put(np.full(n_kv, listed.shape[1], np.uint32)),
        ),
        ranges=device.put(pages.astype(np.uint32)),
        counts=device.put(np.full(n_kv, n_pages, np.uint32)),
        k=device.empty(n_kv * n_pages * dim * 4), v=device.empty(n_kv * n_pages * dim * 4),
    )  # fmt: skip

    def average() -> None:
        device.launch("mean_rows", means, (n_pages, n_kv), shared=MEAN_SHARED_BYTES)

    yield Case("mean_rows", "bytes", 2.0 * n_kv * n_pages * 64 * dim * 2, average)
    device.free_all()


def attention_by_tiles(device: Device, sizes: Sizes) -> Iterator[Case]:
    """The last rows of a prompt over a cache in f16 on tensor cores, and column sums of them.

    Counted as one product each of queries and of weights: a query takes two, as the sum of halves.
    """
    dim, n_heads, n_kv, context = sizes.head_dim, sizes.n_heads, sizes.n_kv_heads, sizes.context
    n_rows = min(1024, context // 2)
    stride = (n_heads + 2 * n_kv) * dim
    heads = Heads(n_heads=n_heads, n_kv_heads=n_kv, key_dim=dim, value_dim=dim, value_stride=dim)
    random = np.random.default_rng(0)
    qkv = device.put(random.normal(size=(n_rows, stride)).astype(np.float32))
    k, v = (
        device.put(random.normal(size=(n_kv, context, dim)).astype(np.float16)) for _ in range(2)
    )
    cache = Cache(k=k, v=v, max_context=context)
    width = tile_dim(dim, dim)
    shared = {
        "qkv": qkv, "heads": heads, "stride": stride, "first": context - n_rows, "n_rows": n_rows,
        "scale": dim**-0.5,
    }  # fmt: skip
    states = device.empty(2 * n_rows * n_heads * 2 * 4)
    attend = AttendTiles(
        **shared, lists=(ListedRows * 3)(ListedRows(cache=cache, keys=KeyList())), n_lists=1,
        out=device.empty(n_rows * n_heads * dim * 4), out_stride=n_heads * dim, states=states,
        part_floats=n_rows * n_heads * 2, is_joint=1,
    )  # fmt: skip
    n_parts = column_parts(n_rows)
    sums = Columns(
        **shared, cache=cache, states=states, sums=device.empty(n_parts * n_kv * context * 4),
        keys=KeyList(counts=device.put(np.full(n_kv, context - n_rows, np.uint32))),
        sums_stride=context, part_stride=n_kv * context,
    )  # fmt: skip

    def attend_tiles() -> None:
        grid = (-(-n_rows // 64), n_heads)
        device.launch(f"attend_tiles_{width}", attend, grid, shared=attend_tiles_bytes(width))

    def column_tiles() -> None:
        grid = (-(-(context - n_rows) // 64), n_kv, n_parts)
        device.launch(f"column_tiles_{width}", sums, grid, shared=column_tiles_bytes(width))

    n_products = float(n_rows) * n_heads * (context - n_rows / 2) * dim
    yield Case(f"attend_tiles, {n_rows} rows", "f16", 4 * n_products, attend_tiles)
    n_products = float(n_rows) * n_heads * (context - n_rows) * dim
    yield Case(f"column_tiles, {n_rows} rows", "f16", 2 * n_products, column_tiles)
    device.free_all()


def latent_attention(device: Device, sizes: Sizes) -> Iterator[Case]:
    """Half as many query heads, of one row per token; of DeepSeek-V2-Lite with the large sizes."""
    n_heads, rank, rope_dim = sizes.n_heads // 2, 4 * sizes.head_dim, sizes.head_dim // 2
    nope_dim, row_dim, context, n = sizes.head_dim, rank + rope_dim, sizes.context, sizes.n_single
    n_rows, stride = 8, (n_heads + 1) * row_dim
    kept = device.put(np.full((max(n, context), row_dim), 0.1, np.float16))
    cache = Cache(k=kept, v=kept, max_context=max(n, context))
    qkv = device.put(np.full((n, stride), 0.1, np.float32))
    heads = Heads(
        n_heads=n_heads, n_kv_heads=1, key_dim=row_dim, value_dim=rank, value_stride=row_dim
    )
    shared = {"qkv": qkv, "cache": cache, "heads": heads, "stride": stride, "scale": 0.1}
    attend = attending(device, shared, n_rows, context, min(16, n_heads))
    products = 2.0 * n_heads * context * (row_dim + rank)
    yield Case("latent attention of a token", "bytes", context * row_dim * 2, attend(1))
    yield Case("latent attention of 8 rows of a prompt", "f32", n_rows * products, attend(n_rows))
    table = device.put(np.full((n, rope_dim // 2), 0.5, np.float32))
    latent = Latent(
        qkv=qkv, heads=device.put(np.full((n, n_heads, nope_dim + rope_dim), 0.5, np.float32)),
        cos=table, sin=table, norm=device.put(np.ones(rank, np.float32)), cache=cache,
        n_heads=n_heads, rank=rank, nope_dim=nope_dim, rope_dim=rope_dim, stride=stride, eps=1e-5,
    )  # fmt: skip
    n_bytes = n * (2 * n_heads * rope_dim * 4 + row_dim * (2 * 4 + 2))

    def make_rows() -> None:
        device.launch("latent_rows", latent, (n_heads + 1, n), 32)

    yield Case("latent_rows", "bytes", n_bytes, make_rows)
    device.free_all()


def row_kernels(device: Device, sizes: Sizes) -> Iterator[Case]:
    """What is done row by row, bound by memory."""
    n, dim, ffn_dim = sizes.n_single, sizes.dim, sizes.ffn_dim
    x = device.put(np.full((n, dim), 0.5, np.float32))
    y = device.put(np.full((n, dim), 0.5, np.float32))
    weight = device.put(np.ones(dim, np.float32))
    rows, row_bytes = put_rows(device, n, dim)
    norm = Norm(
        x=x, weight=weight, xq=rows, dim=dim, n_groups=1, x_stride=dim, out_stride=dim, eps=1e-5
    )
    add = Add(x=x, y=y, weight=weight, dim=dim, eps=1e-5, scale=1.0)
    gate, up = (device.put(np.full((n, ffn_dim), 0.5, np.float32)) for _ in range(2))
    wide, wide_bytes = put_rows(device, n, ffn_dim)
    gated = Gate(gate=gate, up=up, xq=wide, dim=ffn_dim, gate_stride=ffn_dim)
    head_dim, n_pairs = sizes.head_dim, sizes.head_dim // 2
    n_heads, n_kv = sizes.n_heads, sizes.n_kv_heads
    stride = (n_heads + 2 * n_kv) * head_dim
    table = device.put(np.full((n, n_pairs), 0.5, np.float32))
    k, v = (device.empty(n_kv * n * head_dim * 2) for _ in range(2))
    rope = Rope(
        qkv=device.put(np.full((n, stride), 0.5, np.float32)), cos=table, sin=table,
        cache=Cache(k=k, v=v, max_context=n), stride=stride, n_pairs=n_pairs,
        heads=Heads(n_heads=n_heads, n_kv_heads=n_kv, key_dim=head_dim, value_dim=head_dim),
    )  # fmt: skip
    rope_bytes = 2 * n * stride * 4 + 2 * n_kv * n * head_dim * 2
    for name, arguments, grid, threads, n_bytes in (
        ("norm_rows", norm, (n,), 256, n * dim * 4 + row_bytes),
        ("add_rows", add, (n,), 128, 3 * n * dim * 4),
        ("gate_rows", gated, (n, -(-ffn_dim // 512)), 128, 2 * n * ffn_dim * 4 + wide_bytes),
        ("rope_rows", rope, (n_heads + 2 * n_kv, n), 32, rope_bytes),
    ):

        def launch(
            name: str = name,
            a: Structure = arguments,
            grid: tuple[int, ...] = grid,
            threads: int = threads,
        ) -> None:
            device.launch(name, a, grid, threads=threads, shared=512)

        yield Case(name, "bytes", n_bytes, launch)
    device.free_all()


def recurrent(device: Device, sizes: Sizes) -> Iterator[Case]:
    """A convolution between gates, bound by memory; a delta net and Mamba-2 over a prompt."""
    n, dim, n_taps = sizes.n_single, sizes.dim, 4
    rows = device.put(np.full((n, 3 * dim), 0.5, np.float32))
    convolved = Convolve(
        x=rows, gate=rows + 4 * dim, factor=rows + 8 * dim, out=device.empty(n * dim * 4),
        weights=device.put(np.full((n_taps, dim), 0.1, np.float32)),
        state=device.put(np.zeros((n_taps - 1, dim), np.float32)),
        stride=3 * dim, channels=dim, n_taps=n_taps, n_rows=n,
    )  # fmt: skip
    head_dim, n_heads, n_keys = sizes.head_dim, sizes.n_heads, sizes.n_heads // 2
    stride = (2 * n_keys + n_heads) * head_dim
    random = np.random.default_rng(2)
    qkv = random.normal(scale=head_dim**-0.5, size=(n, stride)).astype(np.float32)
    state = np.zeros((n_heads, head_dim, head_dim), np.float32)
    ruled = Delta(
        qkv=device.put(qkv), gates=device.put(np.full((n, 2, n_heads), 0.5, np.float32)),
        state=device.put(state), out=device.empty(n * n_heads * head_dim * 4), stride=stride,
        n_rows=n, n_key_heads=n_keys, n_value_heads=n_heads, head_dim=head_dim,
    )  # fmt: skip
    shared = (head_dim * 36 + 3 * 128) * 4

    columns = 16  # of a slice of the state; neighbouring heads share what writes to it and reads it
    inner, n_groups = n_heads * head_dim, max(1, n_heads // 16)
    width = inner + 2 * n_groups * head_dim
    small = device.put(np.full(n_heads, -0.1, np.float32))
    scanned = Ssd(
        rows=device.put(np.full((n, width), 0.1, np.float32)),
        rates=device.put(np.full((n, n_heads), 0.1, np.float32)),
        a=small, biases=small, skips=small, state=device.put(state),
        out=device.empty(n * inner * 4), stride=width, rate_stride=n_heads, n_rows=n,
        n_heads=n_heads, n_groups=n_groups, head_dim=head_dim, state_dim=head_dim,
    )  # fmt: skip

    def scan() -> None:
        device.launch("ssd", scanned, (head_dim // columns, n_heads), shared=SSD_SHARED_BYTES)

    def convolve() -> None:
        device.launch("convolve_rows", convolved, (-(-dim // 128), n))

    def rule() -> None:
        device.launch("delta_rule", ruled, (head_dim // 32, n_heads), shared=shared)

    yield Case("convolve_rows", "bytes", 4 * n * dim * 4, convolve)
    # Of every number of a state: two products, its decay and what is added.
    yield Case("delta_rule", "f32", 7.0 * n * n_heads * head_dim**2, rule)
    # One product less: nothing is taken from a state before it is written to.
    yield Case("ssd", "f32", 5.0 * n * n_heads * head_dim**2, scan)
    device.free_all()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--library", type=Path, default=Path("libcuda.so.1"))
    parser.add_argument(
        "--small", action="store_true", help="sizes that the host device is fit for"
    )
    parser.add_argument("--peaks", type=Path, metavar="FILE", help="PTX of bench/cuda_peaks.cu")
    parser.add_argument("--write-peaks", type=Path, metavar="FILE", help="compile that, no more")
    arguments = parser.parse_args(argv)
    ptx = peaks_ptx(arguments.peaks)
    if arguments.write_peaks:
        if ptx is None:
            print("no NVRTC was found; tools.build_cuda_images --fetch gets it", file=sys.stderr)
            return 1
        arguments.write_peaks.write_bytes(ptx)
        return 0
    device, sizes = Device(arguments.library), SMALL if arguments.small else LARGE
    peaks = measure_peaks(device, sizes, ptx)
    units = {"bytes": "GB/s", "s8": "Gop/s", "f16": "Gflop/s", "f32": "Gflop/s"}
    for limit, peak in peaks.items():
        print(f"limit of {limit}: {peak / 1e9:,.0f} {units[limit]}")
    if not peaks:
        print("no limits were measured: an emulated device, or nothing that compiles their kernels")
    print(
        "\n| kernel | bound by | amount | time | rate | of the limit |\n|---|---|---|---|---|---|"
    )
    for cases in (
        products,
        attention,
        attention_by_tiles,
        latent_attention,
        row_kernels,
        recurrent,
    ):
        for case in cases(device, sizes):
            seconds = seconds_of(device, case.launch)
            rate = case.amount / seconds
            cells = [
                case.name,
                case.limit,
                f"{case.amount / 1e6:,.2f} M",
                f"{seconds * 1e6:,.1f} us",
            ]
            cells.append(f"{rate / 1e9:,.1f} {units[case.limit]}")
            cells.append(f"{rate / peaks[case.limit]:.0%}" if case.limit in peaks else "")
            print("|", " | ".join(cells), "|", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

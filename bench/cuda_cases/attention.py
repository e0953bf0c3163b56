"""Attention over a cache, row by row, by tiles and latent, and what goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tools.cuda_driver import (
    COMBINE_SHARED_BYTES,
    MEAN_SHARED_BYTES,
    Attend,
    AttendTiles,
    Cache,
    Columns,
    Combine,
    Device,
    Heads,
    KeyList,
    Latent,
    ListedRows,
    Means,
    attend_shared_bytes,
    attend_tiles_bytes,
    column_parts,
    column_tiles_bytes,
    tile_dim,
)

from .case import Case, Sizes


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

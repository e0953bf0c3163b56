"""Latent attention on the host device against float64: rows that are keys and values at once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.packing import EPS, ORDERS, normed
from tests.reference.cached_rows import stored as stored_rows
from tools.cuda_driver import (
    COMBINE_SHARED_BYTES,
    Attend,
    Cache,
    Columns,
    Combine,
    Device,
    Heads,
    Join,
    KeyList,
    Latent,
    attend_shared_bytes,
)

CACHE_TYPES = {"f16": np.float16, "f32": np.float32}


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
def test_latent_rows(device: Device, cache_type: str) -> None:
    """Queries get their rotated part; the row is normed, rotated and written to the cache."""
    random = np.random.default_rng(3)
    n_rows, n_heads, rank, nope_dim, rope_dim, first, context = 3, 5, 40, 10, 24, 17, 32
    row_dim, head_dim, n_pairs = rank + rope_dim, nope_dim + rope_dim, rope_dim // 2
    stride = (n_heads + 1) * row_dim + 4
    qkv = random.normal(size=(n_rows, stride)).astype(np.float32)
    heads = random.normal(size=(n_rows, n_heads, head_dim)).astype(np.float32)
    angles = random.uniform(0, 6, size=(n_rows, n_pairs))
    norm = random.normal(size=rank).astype(np.float32)
    row_bytes = {"f16": 2 * row_dim, "f32": 4 * row_dim, "q8_0": row_dim // 32 * 34}[cache_type]

    expected = qkv.astype(np.float64)
    rows = expected[:, : (n_heads + 1) * row_dim].reshape(n_rows, n_heads + 1, row_dim)
    rows[:, n_heads, :rank] = normed(rows[:, n_heads, :rank], norm)
    parts = np.concatenate((heads[:, :, nope_dim:], rows[:, n_heads:, rank:]), axis=1)
    a, b = parts[..., :n_pairs].astype(np.float64), parts[..., n_pairs:]
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    rows[..., rank:] = np.concatenate((a * c - b * s, a * s + b * c), axis=-1)
    kept = stored_rows(rows[:, n_heads].astype(np.float32), cache_type)
    for _ in range(ORDERS):
        empty = np.full((context, row_bytes), 0x77, np.uint8)
        cache = device.put(empty)
        types = dict.fromkeys(("k_type", "v_type"), ("f16", "f32", "q8_0").index(cache_type))
        address = device.put(qkv)
        arguments = Latent(
            qkv=address, heads=device.put(heads), cos=device.put(np.cos(angles).astype(np.float32)),
            sin=device.put(np.sin(angles).astype(np.float32)), norm=device.put(norm),
            cache=Cache(k=cache, v=cache, max_context=context, **types), n_heads=n_heads,
            rank=rank, nope_dim=nope_dim, rope_dim=rope_dim, stride=stride, first=first, eps=EPS,
        )  # fmt: skip
        device.launch("latent_rows", arguments, (n_heads + 1, n_rows), threads=32)
        got = device.get(address, qkv.shape, np.float32)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        stored = device.get(cache, empty.shape, np.uint8)
        written = stored[first : first + n_rows]
        assert (np.delete(stored, np.s_[first : first + n_rows], axis=0) == 0x77).all()
        if cache_type in CACHE_TYPES:
            values = written.view(CACHE_TYPES[cache_type]).astype(np.float64)
            np.testing.assert_allclose(values, kept, rtol=1e-3 if cache_type == "f16" else 1e-5)
            continue
        blocks = written.reshape(n_rows, -1, 34)
        scales = blocks[..., :2].copy().view(np.float16).astype(np.float64)
        values = blocks[..., 2:].view(np.int8) * scales
        error = np.abs(values - kept.reshape(values.shape))
        assert (error <= scales * 1.001).all()  # a tie may go either way
        assert (error > 1e-7).mean() < 0.02


@pytest.mark.parametrize(
    ("n_heads", "rank", "rope_dim", "block_heads", "cache_type"),
    [
        (16, 512, 64, 16, "f16"),
        (40, 256, 32, 16, "f16"),
        (70, 20, 8, 16, "f32"),
        (9, 20, 8, 2, "f32"),
    ],
)
def test_many_heads_of_one_row(
    device: Device, n_heads: int, rank: int, rope_dim: int, block_heads: int, cache_type: str
) -> None:
    """Of DeepSeek-V2-Lite, MiniCPM3, and more: values are the first part of their keys.

    Own chunk and listed positions in one softmax, in blocks of query heads, and the column sums of
    all heads.
    """
    random = np.random.default_rng(n_heads)
    dtype, row_dim, first, n_rows, n_listed = CACHE_TYPES[cache_type], rank + rope_dim, 150, 2, 131
    scale, context = row_dim**-0.5, first + n_rows
    qkv = random.normal(size=(n_rows, n_heads + 1, row_dim)).astype(np.float32)
    keys = random.normal(size=(context, row_dim)).astype(dtype)
    positions = np.sort(random.choice(first, n_listed, replace=False)).astype(np.int32)
    rows = keys.astype(np.float64)
    expected = np.zeros((n_rows, n_heads, rank))
    sums = np.zeros(n_listed)
    for row in range(n_rows):
        at = np.concatenate((positions, np.arange(first, first + row + 1)))
        logits = qkv[row, :n_heads].astype(np.float64) @ rows[at].T * scale
        share = np.exp(logits - logits.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        expected[row] = share @ rows[at, :rank]
        sums += share[:, :n_listed].sum(0)

    stored = device.put(keys)
    types = dict.fromkeys(("k_type", "v_type"), int(cache_type == "f32"))
    shared = {
        "qkv": device.put(qkv), "stride": (n_heads + 1) * row_dim, "first": first, "scale": scale,
        "cache": Cache(k=stored, v=stored, max_context=context, **types),
        "heads": Heads(
            n_heads=n_heads, n_kv_heads=1, key_dim=row_dim, value_dim=rank, value_stride=row_dim
        ),
    }  # fmt: skip
    listed = KeyList(
        positions=device.put(positions), counts=device.put(np.array([n_listed], np.uint32))
    )
    parts = device.empty(n_rows * n_heads * 3 * rank * 4)
    states, state = (device.empty(n_rows * n_heads * n * 8) for n in (3, 1))
    n_blocks, n_bytes = -(-n_heads // block_heads), attend_shared_bytes(block_heads, row_dim)
    assert n_bytes <= 64 * 1024
    out = device.empty(expected.size * 4)
    combine = Combine(
        parts=parts, states=states, out=out, n_heads=n_heads, value_dim=rank, n_splits=3
    )
    results = []
    for _ in range(ORDERS):
        for key_list, begin, n_ranges in ((KeyList(lowest=first), 0, 1), (listed, 1, 2)):
            attend = Attend(
                **shared, parts=parts, states=states, keys=key_list, first_split=begin,
                n_splits=3, block_heads=block_heads,
            )  # fmt: skip
            device.launch("attend_split", attend, (n_ranges, n_blocks, n_rows), shared=n_bytes)
        device.launch("combine_splits", combine, (n_heads, n_rows), shared=COMBINE_SHARED_BYTES)
        results.append(device.get(out, expected.shape, np.float32))
    np.testing.assert_allclose(results[0], expected, rtol=2e-5, atol=2e-6)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])

    join = Join(states=states, out=state, n_rows=n_rows * n_heads, n_joined=3, n_splits=3)
    device.launch("join_states", join, (-(-n_rows * n_heads // 128),))
    at = device.empty(n_listed * 4)
    columns = Columns(
        **shared, states=state, sums=at, keys=listed, n_rows=n_rows, sums_stride=n_listed
    )
    device.launch("column_sums", columns, (-(-n_listed // 4), 1))
    np.testing.assert_allclose(device.get(at, sums.shape, np.float32), sums, rtol=3e-5, atol=1e-6)

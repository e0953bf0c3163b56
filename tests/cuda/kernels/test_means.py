"""Rows that stand for several positions, on the host device against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.packing import ORDERS
from tools.cuda_driver import MEAN_SHARED_BYTES, Cache, Device, Heads, KeyList, Means

N_KV, CONTEXT, MOST, N_ROWS = 2, 700, 90, 5
# Of the first KV head; the second has two of them. The third is longer than a block has threads.
RANGES = np.array([[0, 16], [16, 144], [144, 600], [600, 601], [601, 640]], np.uint32)
COUNTS = np.array([5, 2], np.uint32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(24, 40), (128, 96), (8, 8), (6, 10), (256, 512)]
)
def test_mean_rows(device: Device, dtype: type[np.floating], key_dim: int, value_dim: int) -> None:
    """Means of ranges without what is listed, of every position of a range but one too."""
    random = np.random.default_rng(key_dim)
    keys = random.normal(size=(N_KV, CONTEXT, key_dim)).astype(dtype)
    values = random.normal(size=(N_KV, CONTEXT, value_dim)).astype(dtype)
    all_but_one = np.setdiff1d(np.arange(16), [7])
    others = np.concatenate((np.arange(16, 140, 3), [144, 271, 272, 599, 601, 639, 650]))
    lists = [np.concatenate((all_but_one, others)), np.array([3, 15, 100, 144, 699])]
    positions = np.full((N_KV, MOST), CONTEXT - 1, np.int32)
    for head, listed in enumerate(lists):
        positions[head, : len(listed)] = listed
    kind = int(dtype is np.float32)
    cache = Cache(
        k=device.put(keys), v=device.put(values), max_context=CONTEXT, k_type=kind, v_type=kind
    )
    heads = Heads(
        n_heads=4, n_kv_heads=N_KV, key_dim=key_dim, value_dim=value_dim, value_stride=value_dim
    )
    n_listed = np.array([len(listed) for listed in lists], np.uint32)
    shapes = (N_KV, N_ROWS, key_dim), (N_KV, N_ROWS, value_dim)
    results = []
    for _ in range(ORDERS):
        k, v = (device.put(np.full(shape, np.nan, np.float32)) for shape in shapes)
        arguments = Means(
            cache=cache, heads=heads, n_rows=N_ROWS,
            keys=KeyList(
                positions=device.put(positions), counts=device.put(n_listed), stride=MOST
            ),
            ranges=device.put(np.stack((RANGES, RANGES))), counts=device.put(COUNTS), k=k, v=v,
        )  # fmt: skip
        device.launch("mean_rows", arguments, (N_ROWS, N_KV), shared=MEAN_SHARED_BYTES)
        results.append([device.get(x, s, np.float32) for x, s in zip((k, v), shapes, strict=True)])
    for head, count in enumerate(COUNTS):
        for row, (begin, end) in enumerate(RANGES):
            left = np.setdiff1d(np.arange(begin, end), lists[head])
            for got, cached in zip(results[0], (keys, values), strict=True):
                if row >= count:
                    assert np.isnan(got[head, row]).all()
                    continue
                expected = cached[head, left].astype(np.float64).mean(0)
                np.testing.assert_allclose(got[head, row], expected, rtol=1e-5, atol=2e-6)
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(ours, theirs)

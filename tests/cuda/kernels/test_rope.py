"""Rotation on the host device, and what it writes to caches of every type, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.packing import EPS, normed
from tests.reference.cached_rows import stored as stored_rows
from tools.cuda_driver import (
    COMBINE_SHARED_BYTES,
    Attend,
    Cache,
    Combine,
    Device,
    Heads,
    KeyList,
    Rope,
    attend_shared_bytes,
)

N_HEADS, N_KV, KEY_DIM, VALUE_DIM, CONTEXT = 6, 2, 24, 40, 320
HEADS = Heads(
    n_heads=N_HEADS, n_kv_heads=N_KV, key_dim=KEY_DIM, value_dim=VALUE_DIM, value_stride=VALUE_DIM
)
STRIDE = (N_HEADS + N_KV) * KEY_DIM + N_KV * VALUE_DIM


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("cache_type", [0, 1])
def test_rope_rows(device: Device, cache_type: int, has_norms: bool) -> None:
    """Rotated; then, where wanted, normed and the queries scaled; and written to the cache."""
    random = np.random.default_rng(4)
    dtype, first, n_pairs = (np.float16, np.float32)[cache_type], 17, 8
    qkv = random.normal(size=(3, STRIDE)).astype(np.float32)
    angles = random.uniform(0, 6, size=(3, n_pairs))
    keys = np.zeros((N_KV, CONTEXT, KEY_DIM), dtype)
    values = np.zeros((N_KV, CONTEXT, VALUE_DIM), dtype)
    types = {"k_type": cache_type, "v_type": cache_type}
    cache = Cache(k=device.put(keys), v=device.put(values), max_context=CONTEXT, **types)
    address = device.put(qkv)
    arguments = Rope(
        qkv=address, cos=device.put(np.cos(angles).astype(np.float32)),
        sin=device.put(np.sin(angles).astype(np.float32)), cache=cache, heads=HEADS,
        stride=STRIDE, n_pairs=n_pairs, first=first, norms_values=has_norms, eps=EPS,
    )  # fmt: skip
    if has_norms:  # a part of the position is known to the device alone
        arguments.first, arguments.start = 5, device.put(np.array([first - 5], np.uint32))
    q_norm, k_norm = random.normal(size=(2, KEY_DIM)).astype(np.float32)
    factors = random.uniform(1, 2, size=3).astype(np.float32)
    if has_norms:
        arguments.q_norm, arguments.k_norm = device.put(q_norm), device.put(k_norm)
        arguments.q_factors = device.put(factors)
    device.launch("rope_rows", arguments, (N_HEADS + 2 * N_KV, 3), threads=32)
    n_rotated = (N_HEADS + N_KV) * KEY_DIM
    expected = qkv.astype(np.float64)
    heads = expected[:, :n_rotated].reshape(3, -1, KEY_DIM)
    a, b = heads[:, :, :n_pairs].copy(), heads[:, :, n_pairs : 2 * n_pairs].copy()
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    heads[:, :, :n_pairs], heads[:, :, n_pairs : 2 * n_pairs] = a * c - b * s, a * s + b * c
    if has_norms:
        heads[:, :N_HEADS] = normed(heads[:, :N_HEADS], q_norm) * factors[:, None, None]
        heads[:, N_HEADS:] = normed(heads[:, N_HEADS:], k_norm)
        rows = expected[:, n_rotated:].reshape(3, N_KV, VALUE_DIM)
        rows[:] = normed(rows, np.ones(VALUE_DIM, np.float32))
    np.testing.assert_allclose(
        device.get(address, qkv.shape, np.float32), expected, rtol=1e-5, atol=1e-6
    )
    keys[:, first : first + 3] = heads[:, N_HEADS:].transpose(1, 0, 2)
    values[:, first : first + 3] = expected[:, n_rotated:].reshape(3, N_KV, -1).transpose(1, 0, 2)
    tolerance = 1e-3 if cache_type == 0 else 1e-6
    for stored, at in ((keys, cache.k), (values, cache.v)):
        got = device.get(at, stored.shape, dtype).astype(np.float64)
        np.testing.assert_allclose(got, stored.astype(np.float64), rtol=tolerance, atol=tolerance)


def test_a_cache_in_8_bits(device: Device) -> None:
    """Written as the CPU writes it, a block of 32 at a time; read as what that stands for."""
    random = np.random.default_rng(13)
    dim, n_rows, n_splits, scale = 64, 130, 2, 0.3
    heads = Heads(n_heads=2, n_kv_heads=2, key_dim=dim, value_dim=dim, value_stride=dim)
    qkv = random.normal(size=(n_rows, 6, dim)).astype(np.float32)
    qkv[5, 2, :32] = 0  # a block of zeros
    qkv[6, 4, 32:] *= 1e-9  # too small for an f16 scale
    expected = stored_rows(qkv[:, 2:], "q8_0").reshape(n_rows, 2, 2, dim)  # row, key or value, head

    row_bytes = dim // 32 * 34
    k, v = (device.put(np.zeros((2, n_rows, row_bytes), np.uint8)) for _ in range(2))
    cache = Cache(k=k, v=v, max_context=n_rows, k_type=2, v_type=2)
    address = device.put(qkv)
    rope = Rope(qkv=address, cache=cache, heads=heads, stride=6 * dim)
    device.launch("rope_rows", rope, (6, n_rows), threads=32)
    for part, at in enumerate((k, v)):
        stored = device.get(at, (2, n_rows, dim // 32, 34), np.uint8)
        scales = stored[..., :2].copy().view(np.float16).astype(np.float64)
        values = (stored[..., 2:].view(np.int8) * scales).reshape(2, n_rows, dim)
        steps = np.repeat(scales, 32, -1).reshape(values.shape)
        error = np.abs(values - expected[:, part].transpose(1, 0, 2))
        assert (error <= steps * 1.001).all()  # a tie may go either way
        assert (error > 1e-7).mean() < 1e-3
        expected[:, part] = values.transpose(1, 0, 2)

    n_parts = 2 * n_splits
    parts, states = device.empty(n_parts * dim * 4), device.empty(n_parts * 8)
    attend = Attend(
        qkv=address + (n_rows - 1) * 6 * dim * 4, cache=cache, heads=heads, parts=parts,
        states=states, keys=KeyList(), stride=6 * dim, first=n_rows - 1, n_splits=n_splits,
        block_heads=1, scale=scale,
    )  # fmt: skip
    device.launch("attend_split", attend, (n_splits, 2, 1), shared=attend_shared_bytes(1, dim))
    out = device.empty(2 * dim * 4)
    combine = Combine(
        parts=parts, states=states, out=out, n_heads=2, value_dim=dim, n_splits=n_splits
    )
    device.launch("combine_splits", combine, (2, 1), shared=COMBINE_SHARED_BYTES)
    for head, got in enumerate(device.get(out, (2, dim), np.float32)):
        logits = expected[:, 0, head] @ qkv[-1, head].astype(np.float64) * scale
        weights = np.exp(logits - logits.max())
        answer = weights / weights.sum() @ expected[:, 1, head]
        np.testing.assert_allclose(got, answer, rtol=2e-5, atol=2e-6)

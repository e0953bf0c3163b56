"""Kernels of single rows on the host device against float64, in several orders of warps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.packing import (
    EPS,
    ORDERS,
    check_quantised,
    empty_quantised,
    normed,
)
from tools.cuda_driver import (
    Add,
    Device,
    Gate,
    Mix,
    Norm,
)

GATES = ("silu", "gelu", "clamped silu", "sigmoid", "relu")  # as the kernels number them


@pytest.mark.parametrize("dim", [16, 100, 576])
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_rows(device: Device, dim: int, has_norm: bool) -> None:
    random = np.random.default_rng(dim)
    x = random.normal(size=(3, dim)).astype(np.float32)
    x[1] = 0  # a row of zeros
    weight = random.normal(size=dim).astype(np.float32)
    expected = normed(x, weight) if has_norm else x.astype(np.float64)
    for _ in range(ORDERS):
        out, rounded = device.empty(x.nbytes), empty_quantised(device, 3, dim)
        arguments = Norm(
            x=device.put(x), weight=device.put(weight) if has_norm else None, out=out, xq=rounded,
            dim=dim, n_groups=1, x_stride=dim, out_stride=dim, eps=EPS,
        )  # fmt: skip
        device.launch("norm_rows", arguments, (3,), 256, shared=32)
        np.testing.assert_allclose(
            device.get(out, x.shape, np.float32), expected, rtol=3e-6, atol=1e-7
        )
        check_quantised(device, rounded, expected)


@pytest.mark.parametrize("own_weights", [False, True])
def test_norm_of_groups_in_place(device: Device, own_weights: bool) -> None:
    random = np.random.default_rng(5)
    x = random.normal(size=(2, 5 * 16)).astype(np.float32)  # 3 heads of 16, and what follows them
    weight = random.normal(size=(3 if own_weights else 1, 16)).astype(np.float32)
    address = device.put(x)
    arguments = Norm(
        x=address, weight=device.put(weight), out=address, dim=16, n_groups=3, x_stride=80,
        out_stride=80, eps=EPS, weight_stride=16 * own_weights,
    )  # fmt: skip
    device.launch("norm_rows", arguments, (6,), 256, shared=32)
    got = device.get(address, x.shape, np.float32)
    expected = normed(x.reshape(2, 5, 16)[:, :3], weight).reshape(2, 48)
    np.testing.assert_allclose(got[:, :48], expected, rtol=3e-6)
    np.testing.assert_array_equal(got[:, 48:], x[:, 48:])


def test_parts_of_heads_are_rounded_by_themselves(device: Device) -> None:
    """Of 3 heads of 56 numbers the first 40, each padded to whole tiles."""
    random = np.random.default_rng(8)
    x = random.normal(size=(2, 3 * 56 + 9)).astype(np.float32)
    rounded = empty_quantised(device, 6, 40)
    arguments = Norm(
        x=device.put(x), xq=rounded, dim=40, n_groups=3, x_stride=x.shape[1], group_stride=56
    )
    device.launch("norm_rows", arguments, (6,), 256, shared=32)
    parts = x[:, : 3 * 56].reshape(6, 56)[:, :40]
    check_quantised(device, rounded, parts.astype(np.float64))


def test_rows_of_experts(device: Device) -> None:
    """Rows are rounded where an index says; a row adds up what its entries name."""
    random = np.random.default_rng(6)
    x = random.normal(size=(5, 72)).astype(np.float32)
    indices = np.array([4, 0, 0, 3], np.int32)
    out, rounded = device.empty(4 * 72 * 4), empty_quantised(device, 4, 72)
    arguments = Norm(
        x=device.put(x), out=out, xq=rounded, dim=72, n_groups=1, x_stride=72, out_stride=72,
        indices=device.put(indices),
    )  # fmt: skip
    device.launch("norm_rows", arguments, (4,), 256, shared=32)
    np.testing.assert_array_equal(device.get(out, (4, 72), np.float32), x[indices])
    check_quantised(device, rounded, x[indices].astype(np.float64))
    entries = np.array([[0, 3], [2, 1], [1, 4]], np.int32)
    weights = random.uniform(size=entries.shape).astype(np.float32)
    mix = Mix(
        x=device.put(x), entries=device.put(entries), weights=device.put(weights), out=out, dim=72,
        n_used=2,
    )  # fmt: skip
    device.launch("mix_rows", mix, (3,))
    expected = (x[entries].astype(np.float64) * weights[:, :, None]).sum(1)
    got = device.get(out, expected.shape, np.float32)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_norm", [True, False])
def test_add_rows(device: Device, has_norm: bool) -> None:
    random = np.random.default_rng(2)
    x, y = random.normal(size=(2, 3, 200)).astype(np.float32)
    weight = random.normal(size=200).astype(np.float32)
    address = device.put(x)
    arguments = Add(
        x=address, y=device.put(y), weight=device.put(weight) if has_norm else None, dim=200,
        eps=EPS, scale=0.4,
    )  # fmt: skip
    device.launch("add_rows", arguments, (3,), shared=16)
    expected = x + 0.4 * (normed(y, weight) if has_norm else y.astype(np.float64))
    np.testing.assert_allclose(
        device.get(address, x.shape, np.float32), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", GATES)
def test_gate_rows(device: Device, kind: str) -> None:
    random = np.random.default_rng(3)
    gate = random.normal(scale=4, size=(2, 1184)).astype(np.float32)
    gate[0, :4] = [0, -100, 100, -1e4]
    up = random.normal(scale=4, size=(2, 1184)).astype(np.float32)
    g = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        slope = np.sqrt(2 / np.pi) * 2 * (g + 0.044715 * g**3) if kind == "gelu" else g
        expected = g / (1 + np.exp(-slope)) * up
        if kind == "clamped silu":  # gpt-oss
            g, u = np.minimum(g, 7), np.clip(up.astype(np.float64), -7, 7)
            expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
        if kind == "sigmoid":
            expected = up / (1 + np.exp(-g))
        if kind == "relu":
            expected = np.maximum(g, 0) * up
    out, rounded = device.empty(gate.nbytes), empty_quantised(device, 2, 1184)
    beside = np.concatenate((gate, np.full((2, 8), np.nan, np.float32)), axis=1)  # of wider rows
    arguments = Gate(
        gate=device.put(beside), up=device.put(up), out=out, xq=rounded, dim=1184, gate_stride=1192,
        kind=GATES.index(kind),
    )  # fmt: skip
    device.launch("gate_rows", arguments, (2, 3))
    got = device.get(out, gate.shape, np.float32)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
    check_quantised(device, rounded, expected)

"""Kernels of layers without attention on the host device against float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda.packing import ORDERS, Floats
from tests.reference.decoder.delta_net import delta_net
from tests.reference.decoder.mamba2 import ssd
from tools.cuda_driver import SSD_SHARED_BYTES, Convolve, Delta, DeltaGate, Device, Ssd

THREADS = 128


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("n_taps", [1, 3, 16])
@pytest.mark.parametrize("is_gated", [True, False])
def test_convolution(device: Device, n_taps: int, is_gated: bool) -> None:
    """Of rows in two calls, with a state between them that holds the last inputs."""
    n_channels, n_rows, stride = 130, 21, 3 * 130
    rows, weights = normal(1, n_rows, stride), normal(2, n_taps, n_channels)
    biases = np.zeros(n_channels, np.float32) if is_gated else normal(4, n_channels)
    state = normal(3, n_taps - 1, n_channels)
    x, gate, factor = (
        rows[:, i * n_channels : (i + 1) * n_channels].astype(np.float64) for i in range(3)
    )
    inputs = np.concatenate((state, x * factor if is_gated else x))
    sums = biases + sum(inputs[j : j + n_rows] * weights[j] for j in range(n_taps))
    expected = sums * gate if is_gated else sums / (1 + np.exp(-sums))
    size = sum(np.abs(inputs[j : j + n_rows] * weights[j]) for j in range(n_taps))
    size = size + np.abs(biases)
    for _ in range(ORDERS):
        at_state, results = device.put(state), []
        for part in np.split(rows, [2]):
            at, out = device.put(part), device.empty(len(part) * n_channels * 4)
            arguments = Convolve(
                x=at, weights=device.put(weights), state=at_state, out=out, stride=stride,
                channels=n_channels, n_taps=n_taps, n_rows=len(part),
            )  # fmt: skip
            if is_gated:
                arguments.gate, arguments.factor = at + n_channels * 4, at + 2 * n_channels * 4
            else:
                arguments.biases = device.put(biases)
            n_blocks = -(-n_channels // THREADS)
            device.launch("convolve_rows", arguments, (n_blocks, len(part)))
            device.launch("keep_inputs", arguments, (n_blocks,))
            results.append(device.get(out, (len(part), n_channels), np.float32))
        error = np.abs(np.concatenate(results) - expected)
        scale = np.abs(gate) if is_gated else 1.1
        assert (error <= 1e-6 * size * scale + 1e-6 * np.abs(expected)).all()
        kept = device.get(at_state, state.shape, np.float32)
        np.testing.assert_allclose(kept, inputs[n_rows:], rtol=1e-6)


def test_gates_of_a_delta_net(device: Device) -> None:
    """Also where exponentials are as large and as small as they get, and decays are near 1."""
    n_rows, n_heads = 41, 7
    gates = normal(1, n_rows, 2, n_heads) * 3
    gates[0, :, :5] = [-1e4, -80, -20, 80, 1e4]
    a = -np.exp(normal(2, n_heads) * 2)
    biases = normal(3, n_heads) - 2
    at = device.put(gates)
    arguments = DeltaGate(
        gates=at, a=device.put(a), biases=device.put(biases), n_rows=n_rows, n_heads=n_heads
    )
    device.launch("delta_gates", arguments, (-(-n_rows * n_heads // THREADS),))
    rates, decays = device.get(at, gates.shape, np.float32).transpose(1, 0, 2)
    exact = gates.astype(np.float64)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(rates, 1 / (1 + np.exp(-exact[:, 0])), rtol=2e-6, atol=1e-37)
    exponents = a * np.logaddexp(0, exact[:, 1] + biases)
    np.testing.assert_allclose(decays, np.exp(exponents), rtol=1e-5, atol=1e-37)
    # What a token forgets is as exact, though it may be little.
    little = -exponents < 1e-3
    assert little.any()
    np.testing.assert_allclose(1 - decays[little], -exponents[little], rtol=2e-3, atol=1.2e-7)


def as_stored(state: NDArray[np.float64]) -> Floats:
    """A state [heads, keys, values] in slices of 32 values."""
    n_heads, dim, _ = state.shape
    slices = state.reshape(n_heads, dim, dim // 32, 32).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(slices, np.float32)


@pytest.mark.parametrize("are_grouped", [False, True])
@pytest.mark.parametrize("dim", [32, 96])
def test_delta_rule(device: Device, dim: int, are_grouped: bool) -> None:
    """Of rows in two calls; the same bits in every order of warps, and in one call."""
    n_rows, n_key_heads, n_heads = 9, 2, 4
    width = (2 * n_key_heads + n_heads) * dim
    stride = width + 8
    qkv = normal(dim, n_rows, stride)
    keys = qkv[:, n_key_heads * dim : 2 * n_key_heads * dim].reshape(n_rows, n_key_heads, dim)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    gates = np.random.default_rng(5).uniform(0.2, 1, (n_rows, 2, n_heads)).astype(np.float32)
    state = normal(6, n_heads, dim, dim).astype(np.float64)
    key_head = np.arange(n_heads) // 2 if are_grouped else np.arange(n_heads) % 2
    heads = qkv[:, :width].reshape(n_rows, -1, dim).astype(np.float64)
    q, k = heads[:, key_head], heads[:, n_key_heads + key_head]
    v, rates, decays = heads[:, 2 * n_key_heads :], gates[:, 0], gates[:, 1]
    expected, after = delta_net(q * dim**0.5, k, v, decays, rates, state)
    results = []
    for lengths in [(n_rows,)] * (ORDERS - 1) + [(1, n_rows - 1)]:
        at_state, outputs, first = device.put(as_stored(state)), [], 0
        for n in lengths:
            out = device.empty(n * n_heads * dim * 4)
            arguments = Delta(
                qkv=device.put(qkv[first : first + n]), gates=device.put(gates[first : first + n]),
                state=at_state, out=out, stride=stride, n_rows=n, n_key_heads=n_key_heads,
                n_value_heads=n_heads, head_dim=dim, are_grouped=are_grouped,
            )  # fmt: skip
            shared = (dim * 36 + 3 * THREADS) * 4
            device.launch("delta_rule", arguments, (dim // 32, n_heads), shared=shared)
            outputs.append(device.get(out, (n, n_heads, dim), np.float32))
            first += n
        stored = device.get(at_state, (n_heads, dim // 32, dim, 32), np.float32)
        results.append((np.concatenate(outputs), stored))
    np.testing.assert_allclose(results[0][0], expected, rtol=1e-5, atol=4e-6 * dim**0.5)
    np.testing.assert_allclose(results[0][1], as_stored(after), rtol=1e-5, atol=4e-6)
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("state_dim", [16, 48, 128, 272])
def test_ssd(device: Device, state_dim: int) -> None:
    """Of rows in two calls, in states of one tile, a part of one and several.

    The same bits in every order of warps, and in one call; rates as large and small as they get.
    """
    n_rows, n_heads, n_groups, dim = 18, 4, 2, 32
    inner = n_heads * dim
    stride, rate_stride = inner + 2 * n_groups * state_dim + 16, n_heads + 3
    rows, rates = normal(state_dim, n_rows, stride), normal(1, n_rows, rate_stride) * 2
    rates[0, :n_heads] = [-100, -20, 80, 0]
    a, biases, skips = -np.exp(normal(2, n_heads) - 2), normal(3, n_heads) - 2, normal(4, n_heads)
    state = normal(6, n_heads, state_dim, dim).astype(np.float64)
    exact = np.logaddexp(0, rates[:, :n_heads].astype(np.float64) + biases)
    x, writes, reads = (
        part.reshape(n_rows, -1, width).astype(np.float64)
        for part, width in zip(
            np.split(rows[:, :-16], [inner, inner + n_groups * state_dim], axis=1),
            (dim, state_dim, state_dim),
            strict=True,
        )
    )
    of_heads = [np.repeat(part, n_heads // n_groups, axis=1) for part in (writes, reads)]
    expected, after = ssd(x, *of_heads, np.exp(a * exact), exact, skips, state)
    results = []
    for lengths in [(n_rows,)] * (ORDERS - 1) + [(1, n_rows - 1)]:
        at_state, outputs, first = device.put(as_columns(state)), [], 0
        for n in lengths:
            out = device.empty(n * inner * 4)
            part = slice(first, first + n)
            arguments = Ssd(
                rows=device.put(rows[part]), rates=device.put(rates[part]),
                a=device.put(a), biases=device.put(biases), skips=device.put(skips), state=at_state,
                out=out, stride=stride, rate_stride=rate_stride, n_rows=n, n_heads=n_heads,
                n_groups=n_groups, head_dim=dim, state_dim=state_dim,
            )  # fmt: skip
            device.launch("ssd", arguments, (dim // 16, n_heads), shared=SSD_SHARED_BYTES)
            outputs.append(device.get(out, (n, n_heads, dim), np.float32))
            first += n
        stored = device.get(at_state, (n_heads, dim // 16, state_dim, 16), np.float32)
        results.append((np.concatenate(outputs), stored))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(results[0][0], expected, rtol=1e-5, atol=2e-6 * scale)
    np.testing.assert_allclose(results[0][1], as_columns(after), rtol=1e-5, atol=1e-5)
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def as_columns(state: NDArray[np.float64]) -> Floats:
    """A state [heads, rows, values] in slices of 16 values."""
    n_heads, n_rows, dim = state.shape
    slices = state.reshape(n_heads, n_rows, dim // 16, 16).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(slices, np.float32)

"""Kernels of recurrent layers and their models, of every ISA, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _recurrent_kernels as _kernels
from tests.joined_cases import for_each
from tests.kernels.inputs import EPS, LENGTHS, normal
from tests.reference.decoder.mamba1 import selective_scan
from tests.reference.decoder.mamba2 import ssd
from tests.reference.decoder.rwkv6 import wkv6
from tests.reference.decoder.rwkv7 import wkv


@for_each("n", LENGTHS)
def test_multiply(isa: str, n: int) -> None:
    x, y = normal(n, n), normal(n + 1, n)
    np.testing.assert_array_equal(_kernels.multiply(isa, x, y), x * y)


@for_each("n", LENGTHS)
def test_gate(isa: str, n: int) -> None:
    gate, up = normal(n, n) * 20, normal(n + 1, n)
    exact = up / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(_kernels.gate(isa, gate, up), exact, rtol=1e-6, atol=1e-30)
    extreme = np.array([-1e30, -200, 0, 200, 1e30], np.float32)
    result = _kernels.gate(isa, extreme, np.ones_like(extreme))
    np.testing.assert_allclose(result, [0, 0, 0.5, 1, 1], atol=1e-30)


@pytest.mark.parametrize("has_bias", [False, True])
@for_each("n", LENGTHS)
def test_layer_norm(isa: str, n: int, has_bias: bool) -> None:
    x, weight = normal(n, n) + np.float32(40.0), normal(n + 1, n)
    bias = normal(n + 2, n) if has_bias else None
    actual = _kernels.layer_norm(isa, x, weight, bias, 1e-5)
    exact = x.astype(np.float64) - x.mean(dtype=np.float64)
    expected = exact / np.sqrt(np.mean(exact**2) + 1e-5) * weight + (0.0 if bias is None else bias)
    # Rounding of the mean shifts all alike, by a digit of 40.
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
    if n == 1:  # nothing but its mean
        np.testing.assert_array_equal(actual, np.zeros(1) if bias is None else bias)


@for_each("n", LENGTHS)
def test_ungated_activations(isa: str, n: int) -> None:
    x = np.concatenate([3.0 * normal(n, n), np.float32([0.0, -0.0, -1e-7, 1e-7, -30.0, 30.0])])
    x = x.astype(np.float32)
    exact = x.astype(np.float64)
    tanh = np.tanh(np.sqrt(2.0 / np.pi) * (exact + 0.044715 * exact**3))
    np.testing.assert_allclose(
        _kernels.gelu(isa, x), 0.5 * exact * (1.0 + tanh), rtol=1e-5, atol=1e-6
    )
    for eps in (-1e-6, -0.5):
        below = 0.7 * (np.expm1(np.minimum(exact, eps)) - exact)
        expected = np.where(exact > 0.0, 0.9 * exact**2, below) + 0.5 * exact
        is_zero = exact == 0.0  # between the branches
        np.testing.assert_allclose(
            _kernels.xielu(isa, x, 0.9, 0.7, 0.5, eps)[~is_zero],
            expected[~is_zero],
            rtol=1e-5,
            atol=2e-7,
        )
    assert np.isnan(_kernels.xielu(isa, np.float32([np.nan]), 0.9, 0.7, 0.5, -1e-6)[0])


@pytest.mark.parametrize("n_stds", [-0.5, 0.0, 1.6448535])
@for_each("n", LENGTHS)
def test_cut_off(isa: str, n: int, n_stds: float) -> None:
    x = np.concatenate([normal(n, n), [3.0]]).astype(np.float32) * 4 + np.float32(2.0)
    exact = x.astype(np.float64)
    expected = np.maximum(exact - exact.mean() - n_stds * exact.std(ddof=1), 0.0)
    actual = _kernels.cut_off(isa, x, n_stds)
    np.testing.assert_allclose(actual, expected, atol=32 * EPS * np.abs(exact).max())


@for_each("n", LENGTHS)
def test_match_size(isa: str, n: int) -> None:
    x, like = normal(n, n) * 5, normal(n + 1, n)
    exact, wanted = x.astype(np.float64), np.mean(like.astype(np.float64) ** 2)
    expected = exact * np.sqrt(wanted / np.mean(exact**2))
    np.testing.assert_allclose(_kernels.match_size(isa, x, like), expected, rtol=8 * EPS)
    tiny = np.full(n, 1e-4, np.float32)  # a mean square of 1e-8 counts as 1e-5
    expected = tiny * np.sqrt(wanted / 1e-5)
    np.testing.assert_allclose(_kernels.match_size(isa, tiny, like), expected, rtol=8 * EPS)
    nothing = np.zeros(n, np.float32)
    np.testing.assert_array_equal(_kernels.match_size(isa, nothing, like), nothing)


@for_each("n", LENGTHS)
def test_streams(isa: str, n: int) -> None:
    streams, computed = normal(n, 4, n), normal(n + 1, n)
    mixture, shares = normal(n + 2, 4, 4), normal(n + 3, 4)
    exact = streams.astype(np.float64)
    np.testing.assert_allclose(
        _kernels.predict_streams(isa, streams, mixture),
        exact + mixture.astype(np.float64) @ exact,
        atol=64 * EPS,
    )
    np.testing.assert_allclose(
        _kernels.correct_streams(isa, streams, computed, shares),
        exact + shares[:, None].astype(np.float64) * (computed - exact[0]),
        atol=16 * EPS,
    )


@for_each("n", LENGTHS)
def test_reglu(isa: str, n: int) -> None:
    gate, up = normal(n, n), normal(n + 1, n)
    np.testing.assert_array_equal(_kernels.reglu(isa, gate, up), np.maximum(gate, 0) * up)
    squares = _kernels.reglu(isa, gate, gate)
    np.testing.assert_array_equal(squares, np.maximum(gate, 0) ** 2)
    assert np.isnan(_kernels.reglu(isa, np.float32([np.nan]), np.float32([1]))[0])


# More tokens than a block of them has, and a single one.
@pytest.mark.parametrize(("n_tokens", "state_dim"), [(1, 16), (70, 48), (150, 128)])
def test_ssd(isa: str, n_tokens: int, state_dim: int) -> None:
    rng = np.random.default_rng(state_dim)
    rows, state = normal(1, n_tokens, 16 + 2 * state_dim), normal(2, state_dim, 16)
    decays = rng.uniform(0, 1, n_tokens).astype(np.float32)
    decays[::7] = 1.0
    rates = rng.uniform(0, 2, n_tokens).astype(np.float32)
    x, b, c = np.split(rows[:, None].astype(np.float64), [16, 16 + state_dim], axis=2)
    gates = (gate[:, None].astype(np.float64) for gate in (decays, rates))
    exact, after = ssd(x, b, c, *gates, np.array([0.75]), state[None].astype(np.float64))
    out, new = _kernels.ssd(isa, rows, decays, rates, 0.75, state)
    np.testing.assert_allclose(new, after[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out, exact[:, 0], rtol=1e-5, atol=2e-5 * state_dim**0.5)
    # In pieces of any length, the same bits.
    pieces = []
    for part in np.split(np.arange(n_tokens), [n_tokens // 3, n_tokens // 3 + 1]):
        if len(part):
            piece, state = _kernels.ssd(isa, rows[part], decays[part], rates[part], 0.75, state)
            pieces.append(piece)
    np.testing.assert_array_equal(np.concatenate(pieces), out)
    np.testing.assert_array_equal(state, new)


@pytest.mark.parametrize(("n_tokens", "state_dim"), [(1, 16), (70, 48), (150, 16)])
def test_selective_scan(isa: str, n_tokens: int, state_dim: int) -> None:
    x, steps = normal(1, n_tokens, 16), 3 * normal(2, n_tokens, 16)
    bc, state = normal(3, n_tokens, 2 * state_dim), normal(4, state_dim, 16)
    a, skips = -np.exp(normal(5, state_dim, 16)), normal(6, 16)
    steps[::5] = -200.0  # the state lasts as it is, bit by bit
    steps[3::9, ::2] = 1e4  # and goes
    exact = (value.astype(np.float64) for value in (bc[:, :state_dim], bc[:, state_dim:], a.T))
    rates = np.logaddexp(0.0, steps.astype(np.float64))
    expected, after = selective_scan(
        x.astype(np.float64), rates, *exact, skips, state.T.astype(np.float64)
    )
    out, new = _kernels.selective_scan(isa, x, steps, bc, a, skips, state)
    scale = np.abs(rates * x).max()  # of what is written
    np.testing.assert_allclose(new, after.T, rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=5e-6 * scale * state_dim**0.5)
    # In pieces of any length, the same bits.
    whole, pieces = state, []
    for part in np.split(np.arange(n_tokens), [n_tokens // 3, n_tokens // 3 + 1]):
        if len(part):
            rows = (values[part] for values in (x, steps, bc))
            piece, state = _kernels.selective_scan(isa, *rows, a, skips, state)
            pieces.append(piece)
    np.testing.assert_array_equal(np.concatenate(pieces), out)
    np.testing.assert_array_equal(state, new)
    first, lasting = _kernels.selective_scan(isa, x[:1], steps[:1], bc[:1], a, None, whole)
    np.testing.assert_array_equal(lasting, whole)
    read = bc[0, state_dim:].astype(np.float64) @ whole
    np.testing.assert_allclose(first[0], read, atol=1e-5 * state_dim**0.5)


@pytest.mark.parametrize("rate", [1e-6, 0.01, 0.7, 3.0, 30.0, 90.0, 1e30])
def test_decays_of_a_selective_scan(isa: str, rate: float) -> None:
    """What a state becomes by itself: exp(a * rate), of steps whose softplus is that rate."""
    a = -np.geomspace(1e-7, 50.0, 16 * 16).astype(np.float32).reshape(16, 16)
    step = np.log(np.expm1(rate)) if rate < 30 else rate
    steps, nothing = np.full((1, 16), step, np.float32), np.zeros((1, 16), np.float32)
    ones = np.ones((16, 16), np.float32)
    _, after = _kernels.selective_scan(
        isa, nothing, steps, np.zeros((1, 32), np.float32), a, None, ones
    )
    exponents = a.astype(np.float64) * np.logaddexp(0.0, steps[0].astype(np.float64))
    expected = np.exp(np.maximum(exponents, -87.33))  # 2^-126 at the least
    np.testing.assert_allclose(after, expected, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize(("n_tokens", "dim"), [(1, 16), (70, 48), (150, 64)])
def test_wkv(isa: str, n_tokens: int, dim: int) -> None:
    decays, rates = (1 / (1 + np.exp(normal(seed, n_tokens, dim))) for seed in (1, 2))
    keys, directions, queries = (normal(seed, n_tokens, dim) for seed in (3, 4, 5))
    values, state = normal(6, n_tokens, 16), normal(7, dim, 16)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    decays[::5] = 1.0
    removals = directions * rates
    parts = (decays, keys, directions, removals, queries, values)
    rows = np.concatenate(parts, axis=1, dtype=np.float32)
    exact = (np.float64(part)[:, None] for part in (queries, decays, keys, values))
    expected, after = wkv(
        *exact,
        np.float64(directions)[:, None],
        np.float64(rates)[:, None],
        np.float64(state.T)[None],
    )
    out, new = _kernels.wkv(isa, rows, state)
    np.testing.assert_allclose(new, after[0].T, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(out, expected[:, 0], rtol=1e-5, atol=5e-5 * dim**0.5)
    # In pieces of any length, the same bits.
    pieces = []
    for part in np.split(np.arange(n_tokens), [n_tokens // 3, n_tokens // 3 + 1]):
        if len(part):
            piece, state = _kernels.wkv(isa, rows[part], state)
            pieces.append(piece)
    np.testing.assert_array_equal(np.concatenate(pieces), out)
    np.testing.assert_array_equal(state, new)


@pytest.mark.parametrize(("n_tokens", "dim"), [(1, 16), (70, 48), (150, 64)])
def test_wkv6(isa: str, n_tokens: int, dim: int) -> None:
    decays = 1 / (1 + np.exp(normal(1, n_tokens, dim)))
    decays[::5], decays[1::7] = 1.0, 0.0
    keys, queries, first = normal(2, n_tokens, dim), normal(3, n_tokens, dim), normal(4, 1, dim)
    values, state = normal(5, n_tokens, 16), normal(6, dim, 16)
    own = np.sum(keys * queries * first, axis=1, keepdims=True)
    rows = np.concatenate((decays, keys, queries, values, own), axis=1, dtype=np.float32)
    exact = (
        np.float64(part)[:, None] for part in (queries, decays.astype(np.float32), keys, values)
    )
    expected, after = wkv6(*exact, np.float64(first), np.float64(state.T)[None])
    out, new = _kernels.wkv6(isa, rows, state)
    np.testing.assert_allclose(new, after[0].T, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(out, expected[:, 0], rtol=1e-5, atol=5e-5 * dim**0.5)
    # In pieces of any length, the same bits.
    pieces = []
    for part in np.split(np.arange(n_tokens), [n_tokens // 3, n_tokens // 3 + 1]):
        if len(part):
            piece, state = _kernels.wkv6(isa, rows[part], state)
            pieces.append(piece)
    np.testing.assert_array_equal(np.concatenate(pieces), out)
    np.testing.assert_array_equal(state, new)


@for_each("n", LENGTHS)
def test_key_decays(isa: str, n: int) -> None:
    """From decays of 1, which are written for steps far below 0, to those of 0."""
    x, biases = np.linspace(-40, 10, n, dtype=np.float32), normal(n, n)
    expected = np.exp(-np.exp(np.float64(x + biases)))
    np.testing.assert_allclose(_kernels.key_decays(isa, x, biases), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("n_taps", [1, 3, 4, 16])
@for_each("n", LENGTHS)
def test_convolve(isa: str, n: int, n_taps: int) -> None:
    taps, weights = normal(n, n_taps, n), normal(n + 1, n_taps, n)
    terms = taps.astype(np.float64) * weights
    error = np.abs(_kernels.convolve(isa, taps, weights) - terms.sum(axis=0))
    assert np.all(error <= n_taps * EPS * np.abs(terms).sum(axis=0))

"""The gated delta rule, token by token and in chunks, of every ISA, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeh2o import _core
from edgeh2o import _recurrent_kernels as _kernels
from tests.kernels.inputs import normal
from tests.reference.decoder.delta_net import delta_net

Floats = np.ndarray
by_row = pytest.mark.parametrize("by_row", [False, True], ids=["by_head", "by_row"])


def _exact(
    q: Floats, k: Floats, v: Floats, decays: Floats, rates: Floats, state: Floats
) -> tuple[Floats, Floats]:
    """Outputs and the state after them, of one head; the state is [key_dim, value_dim]."""
    scaled = q.astype(np.float64) * q.shape[1] ** 0.5  # the definition divides by it
    parts = (x[:, None].astype(np.float64) for x in (scaled, k, v, decays, rates))
    out, after = delta_net(*parts, state[None].astype(np.float64))
    return out[:, 0], after[0]


@by_row
@pytest.mark.parametrize("key_dim", [2, 6, 32, 128])
def test_delta_net(isa: str, key_dim: int, by_row: bool) -> None:
    n, rng = 20, np.random.default_rng(key_dim)
    q, k = (normal(seed, n, key_dim) for seed in (1, 2))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    v, state = normal(3, n, 32), normal(4, key_dim, 32)
    rates = rng.uniform(0.2, 1, n).astype(np.float32)
    decays = rng.uniform(0.2, 1, (n, key_dim) if by_row else n).astype(np.float32)
    exact, after = _exact(q, k, v, decays, rates, state)
    out, new = _kernels.delta_net(isa, q, k, v, decays, rates, state)
    np.testing.assert_allclose(new, after, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=2e-6 * key_dim**0.5 + 1e-6)
    given, place = np.empty_like(out), state.copy()
    _kernels.delta_net(isa, q, k, v, decays, rates, state, given, place)
    np.testing.assert_array_equal(given, out)
    np.testing.assert_array_equal(place, new)
    with pytest.raises(ValueError, match=r"written to is \(19, 32\) and must be \(20, 32\)"):
        _kernels.delta_net(isa, q, k, v, decays, rates, state, given[1:])
    with pytest.raises(ValueError, match="decays one or key_dim"):
        _kernels.delta_net(isa, q, k, v, decays[1:], rates, state)
    # Token by token, the same bits.
    halves = []
    for part in (slice(0, 7), slice(7, n)):
        rows = (np.ascontiguousarray(x[part]) for x in (q, k, v, decays, rates))
        half, state = _kernels.delta_net(isa, *rows, state)
        halves.append(half)
    np.testing.assert_array_equal(np.concatenate(halves), out)
    np.testing.assert_array_equal(state, new)


# Decays that a product of a few is 0 of, and keys that are all the same: what is written then
# replaces all that was there.
@by_row
@pytest.mark.parametrize("kind", ["usual", "vanishing", "lasting", "one key"])
# Less than a tile, full chunks, and a rest of either kind.
@pytest.mark.parametrize(("n", "key_dim"), [(3, 32), (8, 64), (37, 128), (64, 32), (101, 128)])
def test_delta_net_in_chunks(isa: str, n: int, key_dim: int, kind: str, by_row: bool) -> None:
    rng, slices = np.random.default_rng(n), 2
    q, k = (normal(seed, n, key_dim) for seed in (1, 2))
    if kind == "one key":
        k[:] = k[0]
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    v, state = normal(3, n, 32 * slices), normal(4, slices, key_dim, 32)
    rates = rng.uniform(0.2, 1, n).astype(np.float32)
    decays = rng.uniform(0.2, 1, (n, key_dim) if by_row else n).astype(np.float32)
    if kind == "vanishing":
        decays[::2], decays[::6] = 1e-30, 0
        if by_row:
            decays[:, ::3] = 1
    elif kind != "usual":
        decays[:], rates[:] = 1, rng.uniform(0.99, 1, n)
    exact, after = _exact(q, k, v, decays, rates, np.concatenate(list(state), axis=1))
    out, new = _kernels.delta_net_chunks(isa, q, k, v, decays, rates, state)
    np.testing.assert_allclose(np.concatenate(list(new), axis=1), after, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=3e-6 * key_dim**0.5 + 1e-5)

    # Slices by themselves, and calls of whole chunks: the same bits.
    for i in range(slices):
        own, its = np.ascontiguousarray(v[:, 32 * i : 32 * i + 32]), state[i : i + 1]
        alone, alone_after = _kernels.delta_net_chunks(isa, q, k, own, decays, rates, its)
        np.testing.assert_array_equal(alone, out[:, 32 * i : 32 * i + 32])
        np.testing.assert_array_equal(alone_after[0], new[i])
    pieces = []
    for part in np.split(np.arange(n), [32, 96]):
        if len(part):
            rows = (x[part] for x in (q, k, v, decays, rates))
            piece, state = _kernels.delta_net_chunks(isa, *rows, state)
            pieces.append(piece)
    np.testing.assert_array_equal(np.concatenate(pieces), out)
    np.testing.assert_array_equal(state, new)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), n=st.integers(1, 70))
def test_any_decays_by_row(data: st.DataObject, seed: int, n: int) -> None:
    """Also those of which a product underflows, and 0: nothing is divided by them."""
    rng, key_dim = np.random.default_rng(seed), 32
    kinds = st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1e-5, 0.3, 0.97, 1.0])
    some = data.draw(st.lists(kinds, min_size=1, max_size=6))
    decays = rng.choice(np.float32(some), (n, key_dim))
    q, k, v = (rng.standard_normal((n, key_dim)).astype(np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    rates = rng.uniform(0, 1, n).astype(np.float32)
    state = rng.standard_normal((1, key_dim, 32)).astype(np.float32)
    exact, after = _exact(q, k, v, decays, rates, state[0])
    for isa in _core.available_isas():
        out, new = _kernels.delta_net_chunks(isa, q, k, v, decays, rates, state)
        np.testing.assert_allclose(out, exact, rtol=1e-5, atol=5e-5, err_msg=isa)
        np.testing.assert_allclose(new[0], after, rtol=1e-5, atol=2e-5, err_msg=isa)


@pytest.mark.parametrize("n", [1, 15, 32, 128])
@pytest.mark.parametrize("log_floor", [0.0, -5.0, -200.0])
def test_row_decays(isa: str, n: int, log_floor: float) -> None:
    x, biases, a = 30 * normal(n, n), normal(n + 1, n), -1.7 if log_floor == 0.0 else 1.7
    x[: n // 2] /= 100
    steps = x.astype(np.float64) + biases
    exact = _exact_row_decays(steps, a, log_floor)
    # Of the sum and the exponent, one rounding each.
    errors = 4e-7 * (1 + np.abs(np.log(np.maximum(exact, 1e-45))) + np.abs(a * steps))
    actual = _kernels.row_decays(isa, x, biases, a, log_floor)
    assert np.all(np.abs(actual - exact) <= exact * errors + 1e-44)
    assert np.all((actual >= 0) & (actual <= 1))
    extreme, zeros = np.array([-1e30, 1e30, np.nan], np.float32), np.zeros(3, np.float32)
    low, high, none = _kernels.row_decays(isa, extreme, zeros, a, log_floor)
    assert (low, high) == (1.0, pytest.approx(_exact_row_decays(1e30, a, log_floor), rel=1e-5))
    assert np.isnan(none)
    with pytest.raises(ValueError, match="x has 3 elements, biases has 2"):
        _kernels.row_decays(isa, extreme, zeros[:2], a, log_floor)


def _exact_row_decays(steps: Any, a: float, log_floor: float) -> Any:
    if log_floor == 0.0:
        return np.exp(a * np.logaddexp(0.0, steps))
    return np.exp(log_floor * np.exp(-np.logaddexp(0.0, -a * steps)))

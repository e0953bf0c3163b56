"""The sampler against a float64 oracle, and the statistics of its draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeh2o.engine._sampler import Sampler

VOCAB_SIZE = 50


def _logits(seed: int, scale: float = 3.0, size: int = VOCAB_SIZE) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def _oracle(
    logits: NDArray[np.float32],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """Token -> probability, by the plain definitions in float64."""
    values = logits.astype(np.float64)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = order[: top_k or len(order)]
    shares = np.exp(values[order] - values[order[0]])
    shares /= shares.sum()
    before = np.concatenate([[0.0], np.cumsum(shares)[:-1]])
    # A threshold that falls on a sum within rounding has no single right answer.
    if top_p < 1.0:
        assume(np.abs(before - top_p).min() > 1e-9)
    if 0.0 < min_p < 1.0:
        assume(np.abs(shares / shares[0] - min_p).min() > 1e-9)
    kept = [
        token
        for token, share, mass in zip(order, shares, before, strict=True)
        if (top_p == 1.0 or mass < top_p) and share / shares[0] >= min_p
    ]
    weights = np.exp((values[kept] - values[kept[0]]) / temperature)
    return dict(zip(kept, weights / weights.sum(), strict=True))


@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.01, 1.0, 5.0, 40.0]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB_SIZE - 1, VOCAB_SIZE, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.6, 1.0]),
)
def test_distribution_equals_the_oracle(seed: int, scale: float, **filters: Any) -> None:
    logits = _logits(seed, scale)
    expected = _oracle(logits, **filters)
    tokens, probabilities = Sampler(VOCAB_SIZE, **filters).distribution(logits)
    assert tokens.tolist() == list(expected)
    np.testing.assert_allclose(probabilities, list(expected.values()), rtol=1e-12)


def test_equal_logits_prefer_the_lower_token() -> None:
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    tokens, _ = Sampler(VOCAB_SIZE, temperature=1.0, top_k=3).distribution(logits)
    assert tokens.tolist() == [0, 1, 2]
    assert Sampler(VOCAB_SIZE, temperature=0.0).sample(logits) == 0


@pytest.mark.parametrize("seed", range(5))
def test_temperature_zero_is_the_maximum(seed: int) -> None:
    logits = _logits(seed)
    sampler = Sampler(VOCAB_SIZE, temperature=0.0, top_k=5, top_p=0.1, min_p=0.9, seed=seed)
    assert {sampler.sample(logits) for _ in range(20)} == {int(logits.argmax())}


def test_same_seed_draws_the_same_tokens_and_another_does_not() -> None:
    logits = _logits(1, scale=1.0)

    def draw(seed: int) -> list[int]:
        sampler = Sampler(VOCAB_SIZE, temperature=1.0, seed=seed)
        return [sampler.sample(logits) for _ in range(50)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_generator_is_xoshiro256_starstar_seeded_by_splitmix64() -> None:
    """With two tokens, a draw is one bit of the uniform number: its comparison with a half."""
    mask = 2**64 - 1

    def rotate(value: int, bits: int) -> int:
        return (value << bits | value >> (64 - bits)) & mask

    state, seed = [], 42
    for _ in range(4):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        mixed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        state.append(mixed ^ mixed >> 31)
    expected = []
    for _ in range(64):
        result = rotate(state[1] * 5 & mask, 7) * 9 & mask
        expected.append(int((result >> 11) / 2**53 >= 0.5))
        shifted = state[1] << 17 & mask
        state[2] ^= state[0]
        state[3] ^= state[1]
        state[1] ^= state[2]
        state[0] ^= state[3]
        state[2] ^= shifted
        state[3] = rotate(state[3], 45)
    sampler = Sampler(2, temperature=1.0, seed=42)
    assert [sampler.sample(np.zeros(2, np.float32)) for _ in range(64)] == expected


def test_draws_follow_the_distribution() -> None:
    logits = _logits(3, scale=1.5, size=12)
    sampler = Sampler(12, temperature=0.8, seed=5)
    tokens, probabilities = sampler.distribution(logits)
    n_draws = 20_000
    counts = np.bincount([sampler.sample(logits) for _ in range(n_draws)], minlength=12)[tokens]
    expected = probabilities * n_draws
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 31.3  # 99.9th percentile of 11 degrees of freedom


def test_distribution_leaves_the_random_state_alone() -> None:
    logits = _logits(1)
    plain = Sampler(VOCAB_SIZE, temperature=1.0, seed=1)
    watched = Sampler(VOCAB_SIZE, temperature=1.0, seed=1)
    for _ in range(20):
        watched.distribution(logits)
        assert watched.sample(logits) == plain.sample(logits)


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    logits = np.array([2.0, -2.0, 1.5, 0.5], dtype=np.float32)
    sampler = Sampler(4, temperature=1.0, repeat_penalty=2.0, window_size=3)
    for token in (0, 1, 0):
        sampler.accept(token)
    penalised = np.array([1.0, -4.0, 1.5, 0.5], dtype=np.float32)
    tokens, probabilities = sampler.distribution(logits)
    expected = _oracle(penalised, temperature=1.0)
    assert tokens.tolist() == list(expected)
    np.testing.assert_allclose(probabilities, list(expected.values()), rtol=1e-12)
    np.testing.assert_array_equal(logits, [2.0, -2.0, 1.5, 0.5])


def test_repeat_penalty_forgets_tokens_outside_its_window() -> None:
    logits = np.array([2.0, 1.5, 0.0, 0.0], dtype=np.float32)
    sampler = Sampler(4, temperature=0.0, repeat_penalty=2.0, window_size=2)
    sampler.accept(0)
    assert sampler.sample(logits) == 1
    sampler.accept(2)
    assert sampler.sample(logits) == 1
    sampler.accept(3)
    assert sampler.sample(logits) == 0


def test_window_of_zero_turns_the_penalty_off() -> None:
    sampler = Sampler(3, temperature=0.0, repeat_penalty=100.0, window_size=0)
    sampler.accept(0)
    assert sampler.sample(np.array([2.0, 1.0, 0.0], np.float32)) == 0


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.array([50.0, 1.0, 0.0, 0.0], dtype=np.float32)
    assert Sampler(4, temperature=0.0, banned=[0]).sample(logits) == 1
    sampler = Sampler(4, temperature=5.0, banned=[0, 2])
    assert {sampler.sample(logits) for _ in range(200)} == {1, 3}


def test_logits_of_minus_infinity_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], dtype=np.float32)
    for top_k in (0, 3):
        sampler = Sampler(4, temperature=1.0, top_k=top_k)
        tokens, probabilities = sampler.distribution(logits)
        assert tokens.tolist() == [1, 3]
        np.testing.assert_allclose(probabilities, [0.5, 0.5])


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repeat_penalty": 1.3},
    ],
)
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_a_mask_is_logits_of_minus_infinity(filters: dict[str, Any], share: float) -> None:
    draw = np.random.default_rng(7)
    masked, plain = (Sampler(VOCAB_SIZE, window_size=8, seed=3, **filters) for _ in range(2))
    for seed in range(60):
        logits = _logits(seed)
        allowed = draw.random(VOCAB_SIZE) < share
        allowed[seed % VOCAB_SIZE] = True
        bits = np.packbits(allowed, bitorder="little").tobytes() + bytes(seed % 3)
        token = masked.sample(logits, bits)
        assert token == plain.sample(np.where(allowed, logits, np.float32(-np.inf)))
        assert allowed[token]
        masked.accept(token)
        plain.accept(token)


def test_tokens_beyond_a_mask_are_never_drawn() -> None:
    logits = np.arange(VOCAB_SIZE, dtype=np.float32)
    assert Sampler(VOCAB_SIZE, temperature=0.0).sample(logits, b"\xff" * 6) == 47
    for mask in (b"", bytes(6), bytes(7)):
        with pytest.raises(ValueError, match="every token"):
            Sampler(VOCAB_SIZE, temperature=1.0).sample(logits, mask)


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([1e30, -1e30, 3.0], dtype=np.float32)
    _, probabilities = Sampler(3, temperature=temperature).distribution(logits)
    assert np.isfinite(probabilities).all()
    np.testing.assert_allclose(probabilities.sum(), 1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([0.0, np.nan, 0.0], "token 1 is nan"),
        ([0.0, 0.0, np.inf], "token 2 is inf"),
        ([-np.inf, -np.inf, -np.inf], "every token"),
        ([0.0, 0.0], "expected 3 logits, got 2"),
    ],
)
def test_unusable_logits_are_refused(temperature: float, logits: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(3, temperature=temperature).sample(np.array(logits, dtype=np.float32))


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary of 3"):
        Sampler(3, temperature=1.0).accept(3)
    with pytest.raises(ValueError, match=r"in \[0, 3\)"):
        Sampler(3, temperature=1.0, banned=[-1])

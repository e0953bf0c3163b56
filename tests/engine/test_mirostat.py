"""Mirostat 1 and 2: llama.cpp's numbers, the definitions, and what they learn from.

``golden_sampler_orders.json`` has what llama.cpp's samplers leave of logits, and their ``mu`` after
each token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeh2o import SamplingParams
from edgeh2o.engine._sampler import Sampler
from edgeh2o.engine.logits import with_penalties
from edgeh2o.errors import UsageError
from tests.engine.distributions import distribution_of

GOLDEN = json.loads((Path(__file__).parent / "golden_sampler_orders.json").read_text("ascii"))
VERSIONS = (1, 2)


def _logits(seed: int, n: int = 150, scale: float = 2.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


@pytest.mark.parametrize("case", GOLDEN["mirostat"], ids=lambda case: str(case["options"]))
def test_candidates_and_mu_are_those_of_llama_cpp(case: dict[str, Any]) -> None:
    """The likeliest twelve, and the number of all."""
    logits = np.array(case["logits"], np.float32)
    sampler = Sampler(len(logits), **case["options"])
    for number, step in enumerate(case["steps"]):
        turned = np.roll(logits, -number)
        found = distribution_of(sampler, turned)
        tokens, probabilities = step["drawn"]
        assert len(found) == step["kept"]
        assert list(found)[:12] == tokens
        assert list(found.values())[:12] == pytest.approx(probabilities, rel=2e-5)
        assert sampler.sample(turned) in found
        sampler.accept(step["token"])
        assert sampler.mu == pytest.approx(step["mu"], rel=2e-6)


def _oracle(
    logits: NDArray[np.float32], version: int, temperature: float, mu: float
) -> dict[int, float]:
    """Token -> probability, by the papers' definitions in float64."""
    values = logits.astype(np.float64) / temperature
    order = np.lexsort((np.arange(len(values)), -values))
    shares = np.exp(values[order] - values[order[0]])
    shares /= shares.sum()
    if version == 1:
        top = shares[:100]
        ranks = np.arange(1, len(top))
        steps = np.log((ranks + 1) / ranks)
        s = steps @ np.log(top[:-1] / top[1:]) / (steps @ steps)
        rest = s - 1
        with np.errstate(all="ignore"):  # of nearly equal shares it is infinite, or no number
            k = np.power(rest * 2**mu / (1 - len(shares) ** -rest), 1 / s)
        assume(not np.isfinite(k) or abs(k - round(k)) > 1e-6)
        n = len(shares) if k >= len(shares) else max(int(k), 1) if k >= 1 else 1
    else:
        surprise = -np.log2(shares)
        assume(np.abs(surprise - mu).min() > 1e-9)
        n = max(int((surprise <= mu).sum()), 1)
    kept = shares[:n] / shares[:n].sum()
    return dict(zip(order[:n].tolist(), kept.tolist(), strict=True))


@given(
    seed=st.integers(0, 10_000),
    version=st.sampled_from(VERSIONS),
    n=st.sampled_from([2, 30, 100, 150]),
    scale=st.sampled_from([0.5, 2.0, 6.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.8]),
    tau=st.floats(0.0, 8.0),
    eta=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_every_step_is_the_definition(
    seed: int, version: int, n: int, scale: float, temperature: float, tau: float, eta: float
) -> None:
    sampler = Sampler(
        n,
        temperature=temperature,
        mirostat=version,
        mirostat_tau=tau,
        mirostat_eta=eta,
        seed=seed,
    )
    mu = 2 * tau
    for step in range(4):
        logits = _logits(seed + step, n, scale)
        expected = _oracle(logits, version, temperature, mu)
        assert distribution_of(sampler, logits) == pytest.approx(expected, rel=1e-9)
        token = sampler.sample(logits)
        sampler.accept(token)
        mu -= eta * (-np.log2(expected[token]) - tau)
        assert sampler.mu == pytest.approx(mu, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tau", [1.5, 3.0])
def test_surprise_comes_near_the_target(version: int, tau: float) -> None:
    sampler = Sampler(400, temperature=1.0, mirostat=version, mirostat_tau=tau, seed=2)
    surprises = []
    for seed in range(600):
        logits = _logits(seed, 400)
        found = distribution_of(sampler, logits)
        token = sampler.sample(logits)
        surprises.append(-np.log2(found[token]))
        sampler.accept(token)
    assert np.mean(surprises) == pytest.approx(tau, abs=0.1)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_learns_from_what_was_drawn_alone(version: int) -> None:
    logits = _logits(1)
    sampler = Sampler(150, temperature=0.7, mirostat=version, mirostat_tau=2.0, seed=1)
    sampler.accept(3)  # of a prompt
    assert sampler.mu == 4.0
    token = sampler.sample(logits)
    outside = int(logits.argmin())
    assert outside not in distribution_of(sampler, logits)
    sampler.accept(token)  # after another look at the logits
    assert sampler.mu == 4.0
    sampler.sample(logits)
    sampler.accept(outside)
    assert sampler.mu == 4.0
    token = sampler.sample(logits)
    sampler.accept(token)
    once = sampler.mu
    assert once != 4.0
    sampler.accept(token)
    assert sampler.mu == once


@pytest.mark.parametrize("version", VERSIONS)
def test_other_samplers_do_not_act(version: int) -> None:
    rare: dict[str, Any] = {
        **{"top_k": 2, "top_p": 0.3, "min_p": 0.5, "typical_p": 0.3, "top_n_sigma": 0.5},
        **{"xtc_probability": 1.0, "repeat_penalty": 2.0, "window_size": 8},
        **{"dry_multiplier": 1.0, "dry_window_size": 8, "dynatemp_range": 0.5},
        "samplers": ("top_k",),
    }
    options: dict[str, Any] = {"temperature": 0.8, "mirostat": version, "banned": [0, 1]}
    plain, others = Sampler(150, seed=1, **options), Sampler(150, seed=1, **options, **rare)
    for seed in range(30):
        logits = _logits(seed)
        token = plain.sample(logits)
        assert others.sample(logits) == token not in (0, 1)
        plain.accept(token)
        others.accept(token)
    given = {"presence_penalty": 1.0, "frequency_penalty": 1.0}
    assert with_penalties(None, SamplingParams(mirostat=version, **given)) is None
    biased = SamplingParams(mirostat=version, logit_bias={3: 1.0}, **given)
    processor = with_penalties(None, biased)
    assert processor is not None
    processor.accept(5)
    zeros = np.zeros(8, np.float32)
    np.testing.assert_array_equal(processor.process(zeros).nonzero()[0], [3])


@pytest.mark.parametrize("version", VERSIONS)
def test_temperature_zero_takes_the_best(version: int) -> None:
    sampler = Sampler(150, temperature=0.0, mirostat=version, repeat_penalty=9.0, window_size=4)
    for _ in range(3):
        token = sampler.sample(_logits(1))
        assert token == _logits(1).argmax()
        sampler.accept(token)
    assert sampler.mu == 10.0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mask_leaves_few(version: int) -> None:
    sampler = Sampler(3, temperature=1.0, mirostat=version, seed=4)
    logits = np.array([5.0, 1.0, 0.9], np.float32)
    assert {sampler.sample(logits, bytes([0b110])) for _ in range(100)} == {1, 2}
    assert sampler.sample(logits, bytes([0b010])) == 1
    sampler.accept(1)  # of no surprise at all
    assert sampler.mu == pytest.approx(10.0 + 0.1 * 5.0)
    flat = np.zeros(3, np.float32)
    assert {sampler.sample(flat) for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("temperature", [1e-300, 1e30])
def test_extreme_values_stay_finite(version: int, temperature: float) -> None:
    for tau, eta in ((0.0, 1e30), (1e30, 1.0), (5.0, 0.1)):
        sampler = Sampler(
            3, temperature=temperature, mirostat=version, mirostat_tau=tau, mirostat_eta=eta
        )
        for _ in range(4):
            _, probabilities = sampler.distribution(np.array([1e30, -1e30, 3.0], np.float32))
            np.testing.assert_allclose(probabilities.sum(), 1.0)
            sampler.accept(sampler.sample(np.array([1e30, -1e30, 3.0], np.float32)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mirostat": 3}, r"mirostat \(--mirostat\) must be an integer from 0 to 2, got 3"),
        ({"mirostat": 1.0}, r"\(--mirostat\) must be an integer"),
        ({"mirostat_tau": -1}, r"mirostat_tau \(--mirostat-ent\) must be a number >= 0, got -1"),
        ({"mirostat_eta": float("inf")}, r"\(--mirostat-lr\) must be a number >= 0, got inf"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        SamplingParams(**settings)
    if settings.get("mirostat") == 3:
        with pytest.raises(ValueError, match="mirostat must be 0, 1 or 2, got 3"):
            Sampler(3, temperature=1.0, mirostat=3)

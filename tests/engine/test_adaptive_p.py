"""Adaptive-p: llama.cpp's numbers, what it learns from, and where it acts.

``golden_sampler_orders.json`` has what llama.cpp's sampler draws by, and the tokens that it took.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeh2o import SamplingParams
from edgeh2o.engine._sampler import Sampler
from edgeh2o.errors import UsageError
from tests.engine.distributions import distribution_of

GOLDEN = json.loads((Path(__file__).parent / "golden_sampler_orders.json").read_text("ascii"))
ALONE = ("adaptive_p",)


def _logits(seed: int, n: int = 150, scale: float = 2.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


@pytest.mark.parametrize("case", GOLDEN["adaptive"], ids=lambda case: str(case["options"]))
def test_probabilities_are_those_of_llama_cpp(case: dict[str, Any]) -> None:
    """The likeliest twelve, after the same tokens."""
    logits = np.array(case["logits"], np.float32)
    options: dict[str, Any] = {"temperature": 1.0, "samplers": ALONE, **case["options"]}
    sampler = Sampler(len(logits), **options)
    for number, step in enumerate(case["steps"]):
        turned = np.roll(logits, -number)
        found = distribution_of(sampler, turned)
        assert len(found) == len(logits)
        tokens, probabilities = step["drawn"]
        assert [found[token] for token in tokens] == pytest.approx(probabilities, rel=2e-4)
        assert sampler.sample(turned) in found
        sampler.accept(step["token"])


@pytest.mark.parametrize("target", [0.2, 0.5])
def test_probabilities_come_near_the_target(target: float) -> None:
    sampler = Sampler(50, temperature=1.0, samplers=ALONE, adaptive_target=target, seed=2)
    drawn = []
    for seed in range(600):
        logits = _logits(seed, 50, 3.0)
        shares = np.exp(logits.astype(np.float64) - logits.max())
        token = sampler.sample(logits)
        drawn.append(shares[token] / shares.sum())
        sampler.accept(token)
    assert np.mean(drawn) == pytest.approx(target, abs=0.1)


def test_it_acts_behind_the_others_wherever_it_is_named() -> None:
    """By the probabilities that they leave, and by any of the words for it."""
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 12, "min_p": 0.05, "seed": 3}
    options |= {"xtc_probability": 0.5, "xtc_threshold": 0.1}
    named = {"adaptive_target": 0.3, "adaptive_decay": 0.5}
    others = ("top_k", "min_p", "xtc", "temperature")
    orders = [("adaptive_p", *others), (*others, "adaptive_p"), (*others[:2], *ALONE, *others[2:])]
    samplers = [Sampler(150, samplers=order, **options, **named) for order in orders]
    plain = Sampler(150, samplers=others, **options)
    for seed in range(20):
        logits = _logits(seed)
        found = [distribution_of(each, logits) for each in samplers]
        assert found[0] == found[1] == found[2]
        assert found[0].keys() == distribution_of(plain, logits).keys()
        tokens = [each.sample(logits) for each in samplers]
        assert len(set(tokens)) == 1
        for each in samplers:
            each.accept(tokens[0])
        plain.accept(plain.sample(logits))
    for text in ("adaptive-p", "adaptivep", "Adaptive_P"):
        assert SamplingParams(samplers=[text]).samplers == ALONE
    assert SamplingParams(samplers="ka").samplers == ("top_k", "adaptive_p")


def test_it_learns_from_what_was_drawn_alone() -> None:
    options: dict[str, Any] = {"samplers": ("top_k", *ALONE), "top_k": 5, "temperature": 1.0}
    sampler = Sampler(150, adaptive_target=0.4, adaptive_decay=0.5, **options)
    logits = _logits(1)
    before = distribution_of(sampler, logits)
    sampler.accept(3)  # of a prompt
    token = sampler.sample(logits)
    sampler.distribution(logits)
    sampler.accept(token)  # after another look at the logits
    sampler.sample(logits)
    sampler.accept(int(logits.argmin()))
    assert distribution_of(sampler, logits) == before
    sampler.sample(logits)
    sampler.accept(token)
    once = distribution_of(sampler, logits)
    assert once != before
    sampler.accept(token)
    assert distribution_of(sampler, logits) == once
    twin = sampler.twin(150)
    twin.follow(sampler)
    assert distribution_of(twin, logits) == once


@pytest.mark.parametrize(
    "off",
    [
        {"samplers": ALONE, "adaptive_target": -0.1},
        {"samplers": (), "adaptive_target": 0.5},
        {"samplers": ALONE, "adaptive_target": 0.5, "mirostat": 2},
    ],
)
def test_it_is_off(off: dict[str, Any]) -> None:
    others = off | {"adaptive_target": -1.0, "samplers": ()}
    adaptive, plain = (Sampler(150, temperature=1.0, seed=4, **each) for each in (off, others))
    for seed in range(10):
        token = adaptive.sample(_logits(seed))
        assert token == plain.sample(_logits(seed))
        adaptive.accept(token)
        plain.accept(token)


def test_temperature_zero_and_masks() -> None:
    options: dict[str, Any] = {"samplers": ("temperature", *ALONE), "adaptive_target": 0.1}
    greedy = Sampler(150, temperature=0.0, **options)
    assert greedy.sample(_logits(1)) == _logits(1).argmax()
    assert list(distribution_of(greedy, _logits(1)).values()) == [1.0]
    sampler = Sampler(3, temperature=1.0, seed=4, **options)
    logits = np.array([5.0, 1.0, 0.9], np.float32)
    assert {sampler.sample(logits, bytes([0b110])) for _ in range(100)} == {1, 2}
    assert sampler.sample(logits, bytes([0b010])) == 1


@pytest.mark.parametrize("logits", [[1e30, -1e30, 3.0], [0.0, 0.0, 0.0], [-1e30, -1e30, -1e30]])
def test_extreme_values_stay_finite(logits: list[float]) -> None:
    values = np.array(logits, np.float32)
    for target, decay in ((0.0, 0.0), (1.0, 0.99), (0.5, 0.5)):
        sampler = Sampler(
            3, temperature=1e-300, samplers=ALONE, adaptive_target=target, adaptive_decay=decay
        )
        for _ in range(4):
            _, probabilities = sampler.distribution(values)
            np.testing.assert_allclose(probabilities.sum(), 1.0)
            sampler.accept(sampler.sample(values))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"adaptive_target": 1.1}, r"\(--adaptive-target\) must be a number <= 1, got 1.1"),
        ({"adaptive_target": "x"}, r"\(--adaptive-target\) must be a number"),
        ({"adaptive_decay": 1.0}, r"\(--adaptive-decay\) must be in \[0, 0.99\], got 1.0"),
        ({"adaptive_decay": -0.1}, r"\(--adaptive-decay\) must be in"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        SamplingParams(**settings)
    if settings.get("adaptive_target") != "x":
        with pytest.raises(ValueError, match="adaptive_target is 1 at most"):
            Sampler(3, temperature=1.0, **settings)

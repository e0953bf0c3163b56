"""Samplers in other orders than the usual one: llama.cpp's numbers, the definitions, what is off.

``golden_sampler_orders.json`` has what chains of llama.cpp's samplers make of logits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeh2o import SamplingParams
from edgeh2o.engine._sampler import Sampler
from edgeh2o.errors import UsageError
from edgeh2o.sampler_names import SAMPLERS, read_samplers, spell_samplers
from tests.engine.distributions import distribution_of, softmax

GOLDEN = json.loads((Path(__file__).parent / "golden_sampler_orders.json").read_text("ascii"))
N = 30
FILTERS: dict[str, Any] = {
    **{"temperature": 1.7, "top_n_sigma": 2.5, "top_k": 12, "typical_p": 0.9, "top_p": 0.8},
    **{"min_p": 0.02, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    **{"repeat_penalty": 1.4, "window_size": 6},
    **{"dry_multiplier": 0.7, "dry_allowed_length": 1, "dry_window_size": 16},
}


def _logits(seed: int, n: int = N) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(n) * 2).astype(np.float32)


@pytest.mark.parametrize("case", GOLDEN["orders"], ids=lambda case: "-".join(case["samplers"]))
def test_probabilities_are_those_of_llama_cpp(case: dict[str, Any]) -> None:
    logits = np.array(case["logits"], np.float32)
    sampler = Sampler(len(logits), samplers=case["samplers"], **case["options"])
    for token in case.get("recent", ()):
        sampler.accept(token)
    expected = dict(zip(*case["drawn"], strict=True))
    assert distribution_of(sampler, logits) == pytest.approx(expected, rel=3e-5)


def _oracle(
    logits: NDArray[np.float32],
    samplers: Sequence[str],
    recent: Sequence[int],
    by: dict[str, Any],
    xtc: Sequence[bool],
) -> dict[int, float]:
    """Token -> probability, by the plain definitions in float64, one after the other."""
    tokens, values = np.arange(len(logits)), logits.astype(np.float64)
    acts = iter(xtc)
    for name in samplers:
        order = np.lexsort((tokens, -values))
        tokens, values = tokens[order], values[order]
        assume(len(values) == 1 or np.diff(-values).min() > 1e-5)
        shares = softmax(values)
        before = np.concatenate([[0.0], np.cumsum(shares)[:-1]])
        kept = np.full(len(values), True)
        if name == "penalties":
            seen = np.isin(tokens, recent[-by["window_size"] :])
            factor = np.where(values > 0, 1 / by["repeat_penalty"], by["repeat_penalty"])
            values = np.where(seen, values * factor, values)
        elif name == "top_n_sigma":
            floor = values.max() - by["top_n_sigma"] * values.std()
            assume(np.abs(values - floor).min() > 1e-5)
            kept = values >= floor
        elif name == "top_k":
            kept = np.arange(len(values)) < by["top_k"]
        elif name == "typ_p":
            surprise = -np.log(shares)
            distance = np.abs(surprise - shares @ surprise)
            nearest = np.argsort(distance, kind="stable")
            assume(len(tokens) == 1 or np.diff(distance[nearest]).min() > 1e-5)
            mass = np.cumsum(shares[nearest])
            assume(np.abs(mass - by["typical_p"]).min() > 1e-5)
            kept[nearest[int((mass <= by["typical_p"]).sum()) + 1 :]] = False
        elif name == "top_p":
            assume(np.abs(before - by["top_p"]).min() > 1e-5)
            kept = before < by["top_p"]
        elif name == "min_p":
            assume(np.abs(shares / shares[0] - by["min_p"]).min() > 1e-5)
            kept = shares / shares[0] >= by["min_p"]
        elif name == "xtc" and next(acts):
            assume(np.abs(shares - by["xtc_threshold"]).min() > 1e-5)
            kept[: max(0, int((shares >= by["xtc_threshold"]).sum()) - 1)] = False
        elif name == "temperature":
            values = values / by["temperature"]
        tokens, values = tokens[kept], values[kept]
    return dict(zip(tokens.tolist(), softmax(values).tolist(), strict=True))


@given(
    seed=st.integers(0, 10_000),
    samplers=st.lists(st.sampled_from([name for name in SAMPLERS if name != "dry"]), max_size=8),
    recent=st.lists(st.integers(0, N - 1), max_size=12),
    chance=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([0.4, 1.0, 1.7]),
)
def test_any_order_is_the_definition(
    seed: int, samplers: list[str], recent: list[int], chance: float, temperature: float
) -> None:
    logits = _logits(seed)
    options = {**FILTERS, "xtc_probability": chance, "temperature": temperature}
    sampler = Sampler(N, samplers=samplers, **options)
    for token in recent:
        sampler.accept(token)
    n_xtc = samplers.count("xtc")
    assume(n_xtc < 4)
    expected: dict[int, float] = {}
    for choice in range(2**n_xtc):
        acts = [bool(choice >> i & 1) for i in range(n_xtc)]
        share = float(np.prod([chance if each else 1 - chance for each in acts]))
        if share > 0:
            for token, value in _oracle(logits, samplers, recent, options, acts).items():
                expected[token] = expected.get(token, 0.0) + share * value
    # Numbers of 32 bits cannot tell what is less likely than that from what cannot be.
    expected = {token: p for token, p in expected.items() if p > 1e-30}
    found = {token: p for token, p in distribution_of(sampler, logits).items() if p > 1e-30}
    assert found == pytest.approx(expected, rel=2e-5)


def test_dry_stands_where_it_is_named() -> None:
    logits = np.array([2.0, 1.0, 0.5, -1.0], np.float32)
    options: dict[str, Any] = {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_window_size": 9}
    for samplers, values in (
        (("temperature", "dry"), [4.0, 2.0 - 1.0, 1.0, -2.0]),
        (("dry", "temperature"), [4.0, 2.0 - 2.0, 1.0, -2.0]),
        (("top_k", "dry", "temperature"), [4.0, 2.0 - 2.0]),
        (("temperature",), [4.0, 2.0, 1.0, -2.0]),
    ):
        sampler = Sampler(4, temperature=0.5, top_k=2, samplers=samplers, **options)
        for token in (0, 1, 0):
            sampler.accept(token)
        shares = softmax(np.array(values))
        expected = dict(enumerate(shares.tolist()))
        assert distribution_of(sampler, logits) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("left_out", SAMPLERS)
def test_what_is_left_out_is_off(left_out: str) -> None:
    off: dict[str, dict[str, Any]] = {
        "penalties": {"repeat_penalty": 1.0},
        "dry": {"dry_multiplier": 0.0},
        "top_n_sigma": {"top_n_sigma": -1.0},
        "top_k": {"top_k": 0},
        "typ_p": {"typical_p": 1.0},
        "top_p": {"top_p": 1.0},
        "min_p": {"min_p": 0.0},
        "xtc": {"xtc_probability": 0.0},
        "temperature": {"temperature": 1.0},
    }
    samplers = tuple(name for name in SAMPLERS if name != left_out)
    short = Sampler(N, samplers=samplers, **FILTERS)
    plain = Sampler(N, **FILTERS | off[left_out])
    for seed in range(40):  # bit for bit, draws included
        logits = _logits(seed)
        for one, other in zip(short.distribution(logits), plain.distribution(logits), strict=True):
            np.testing.assert_array_equal(one, other)
        token = short.sample(logits)
        assert token == plain.sample(logits)
        short.accept(token)
        plain.accept(token)


def test_an_order_that_changes_nothing_is_the_usual_one() -> None:
    """Bit for bit: what does not act may stand anywhere."""
    moved = ("temperature", "xtc", "min_p", "top_k", "typ_p", "top_p", "penalties")
    options: dict[str, Any] = {"top_k": 9, "top_p": 0.9, "temperature": 1.0, "window_size": 4}
    one, other = Sampler(N, samplers=moved, **options), Sampler(N, **options)
    for seed in range(20):
        logits = _logits(seed)
        for found, expected in zip(
            one.distribution(logits), other.distribution(logits), strict=True
        ):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("samplers", [SAMPLERS[::-1], ("dry", "penalties", "xtc", "temperature")])
def test_draws_follow_the_distribution(samplers: tuple[str, ...]) -> None:
    logits = _logits(4, 12)
    options = {**FILTERS, "min_p": 0.0, "top_p": 0.99, "xtc_threshold": 0.15}
    sampler = Sampler(12, samplers=samplers, seed=3, **options)
    for token in (1, 5, 2, 5):
        sampler.accept(token)
    expected = distribution_of(sampler, logits)
    counts = np.bincount([sampler.sample(logits) for _ in range(20_000)], minlength=12)
    wanted = np.array([expected.get(token, 0.0) for token in range(12)])
    assert counts[wanted == 0].sum() == 0
    left = wanted[wanted > 0] * 20_000
    assert float(((counts[wanted > 0] - left) ** 2 / left).sum()) < 31.3


def test_a_twin_that_follows_draws_alike() -> None:
    sampler = Sampler(N, samplers=SAMPLERS[::-1], seed=5, **FILTERS)
    twin = sampler.twin(N)
    for seed in range(30):
        twin.follow(sampler)
        guess, token = twin.sample(_logits(seed)), sampler.sample(_logits(seed))
        assert guess == token
        sampler.accept(token)


def test_masks_and_bans_come_first() -> None:
    logits = np.array([9.0, 5.0, 4.0, 3.0, 8.0], np.float32)
    sampler = Sampler(
        5, temperature=4.0, top_k=2, samplers=("temperature", "top_k"), banned=[4], seed=1
    )
    assert {sampler.sample(logits) for _ in range(200)} == {0, 1}
    mask = bytes([0b01110])
    assert {sampler.sample(logits, mask) for _ in range(200)} == {1, 2}
    with pytest.raises(ValueError, match="every token"):
        sampler.sample(logits, bytes([0b10000]))


def test_temperature_zero_takes_the_best_where_it_stands() -> None:
    logits = np.array([2.0, 1.9, 1.0], np.float32)

    def best(*samplers: str, **options: Any) -> int:
        sampler = Sampler(
            3, temperature=0.0, repeat_penalty=3.0, window_size=2, samplers=samplers, **options
        )
        sampler.accept(0)
        return sampler.sample(logits)

    assert best(*SAMPLERS) == best("penalties", "temperature") == 1
    assert best("temperature", "penalties") == best("temperature") == 0
    assert best("dry", "penalties", "temperature", dry_multiplier=1.0, dry_window_size=4) == 1
    # Filters before it do not matter, as in the usual order.
    assert best("xtc", "typ_p", "temperature", xtc_probability=1.0, typical_p=0.1) == 0
    # Nor does a temperature that is left out: all tokens are drawn.
    sampler = Sampler(3, temperature=0.0, samplers=("top_k",), top_k=2)
    assert {sampler.sample(logits) for _ in range(100)} == {0, 1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([1e30, -1e30, 3.0], dtype=np.float32)
    for samplers in (("temperature", "top_p"), ("temperature", "typ_p", "temperature", "xtc")):
        sampler = Sampler(
            3,
            **{"temperature": temperature, "top_p": 0.9, "typical_p": 0.9, "xtc_probability": 0.5},
            samplers=samplers,
        )
        _, probabilities = sampler.distribution(logits)
        np.testing.assert_allclose(probabilities.sum(), 1.0)
        assert sampler.sample(logits) in (0, 1, 2)


def test_names_and_letters_are_those_of_llama_cpp() -> None:
    assert SamplingParams().samplers == SAMPLERS
    assert SamplingParams(samplers="edskypmxt").samplers == SAMPLERS
    assert spell_samplers("kz") == "top_k;z"
    forms = ["Top-K", "topk", "nucleus", "typ", "TYPP", "min-p", "temp", "topnsigma", "top_k"]
    known = ("top_k", "top_k", "top_p", "typ_p", "typ_p", "min_p", "temperature", "top_n_sigma")
    assert SamplingParams(samplers=forms).samplers == (*known, "top_k")
    assert SamplingParams(samplers=()).samplers == SamplingParams(samplers="").samplers == ()
    assert read_samplers(["top_k", "tfs_z", "infill", "tfs_z"]) == (("top_k",), ("tfs_z", "infill"))
    assert read_samplers("kK") == (("top_k",), ("K",))


@pytest.mark.parametrize(
    ("samplers", "reason"),
    [
        (["top_k", "tfs_z"], r"samplers \(--samplers\): no such sampler: 'tfs_z'; there are pena"),
        ("kz", "no such sampler: 'z'"),
        (7, "must be names of samplers"),
        (["top_k", 1], "must be names of samplers"),
        (None, "must be names of samplers"),
        (["temp"] * 33, "has 33 names, more than 32"),
    ],
)
def test_samplers_that_cannot_be(samplers: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        SamplingParams(samplers=samplers)


def test_the_sampler_itself_knows_no_other_names() -> None:
    with pytest.raises(ValueError, match="no such samplers: \\['topk'\\]"):
        Sampler(3, temperature=1.0, samplers=["topk"])

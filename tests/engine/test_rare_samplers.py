"""DRY, top-n-sigma, typical sampling, XTC and dynamic temperature: llama.cpp's numbers, oracles.

``golden_samplers.json`` has what llama.cpp's samplers make of logits, and what its DRY takes off
the logits of tokens behind texts (SmolLM2's vocabulary).
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
from edgeh2o.engine.sampling import find_breakers, make_sampler
from edgeh2o.errors import UsageError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.tokenizer import Tokenizer, build_tokenizer
from tests.engine.distributions import softmax

GOLDEN = json.loads((Path(__file__).parent / "golden_samplers.json").read_text("ascii"))
N = 40


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    with open_gguf(smollm2_path) as gguf:
        return build_tokenizer(gguf.metadata)


@pytest.mark.parametrize("case", GOLDEN["filters"], ids=lambda case: str(case["options"]))
def test_probabilities_are_those_of_llama_cpp(case: dict[str, Any]) -> None:
    logits = np.array(case["logits"], np.float32)
    found = Sampler(len(logits), **case["options"]).distribution(logits)
    tokens, probabilities = zip(
        *sorted(zip(*found, strict=True), key=lambda pair: (-pair[1], pair[0])), strict=True
    )
    expected_tokens, expected = case["drawn"]
    assert list(tokens[: len(expected)]) == expected_tokens
    np.testing.assert_allclose(probabilities[: len(expected)], expected, rtol=3e-5)
    assert not any(probabilities[len(expected) :])


def _penalties(sampler: Sampler) -> dict[int, float]:
    """What tokens lose, of which one at least loses nothing, by equal logits."""
    tokens, probabilities = sampler.distribution(np.zeros(sampler.vocab_size, np.float32))
    lost = np.log(probabilities.max() / probabilities)
    return {int(t): float(x) for t, x in zip(tokens, lost, strict=True) if x > 1e-9}


@pytest.mark.parametrize("case", GOLDEN["dry"], ids=lambda case: str(case["options"]))
def test_penalties_on_repetition_are_those_of_llama_cpp(
    tokenizer: Tokenizer, case: dict[str, Any]
) -> None:
    options = case["options"]
    sampling = SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        dry_multiplier=options["multiplier"],
        dry_base=options["base"],
        dry_allowed_length=options["allowed"],
        dry_penalty_last_n=options["last"],
        dry_sequence_breakers=case["breakers"],
    )
    prompt = np.array(tokenizer.encode(case["text"], add_special=False), np.int32)
    vocab_size = tokenizer.vocab_size
    sampler = make_sampler(
        sampling, tokenizer, prompt, vocab_size=vocab_size, context_size=4096, seed=0
    )
    expected = {int(token): lost for token, lost in case["penalties"].items()}
    assert _penalties(sampler) == pytest.approx(expected, rel=1e-5)


def test_breakers_are_looked_for_once(tokenizer: Tokenizer) -> None:
    found = find_breakers(tokenizer, ["\n", "##"])
    assert find_breakers(tokenizer, ("\n", "##")) is found
    for breaker in found:
        text = b"".join(map(tokenizer.token_bytes, breaker))
        assert b"\n" in text or b"##" in text
    assert (tokenizer.encode("\n", add_special=False)[0],) in found
    assert find_breakers(tokenizer, ()) == []
    for number in range(8):  # bounded
        find_breakers(tokenizer, [f"<{number}>"])
    assert find_breakers(tokenizer, ["\n", "##"]) is not found


def _dry_oracle(
    tokens: Sequence[int],
    *,
    multiplier: float,
    base: float,
    allowed: int,
    breakers: Sequence[Sequence[int]],
) -> dict[int, float]:
    """Token -> what it loses, by the definition."""
    n = len(tokens)
    if n <= allowed:
        return {}
    limit = n
    for start in reversed(range(n)):
        ends = [
            start + len(breaker)
            for breaker in breakers
            if list(tokens[start : start + len(breaker)]) == list(breaker)
        ]
        if ends:
            limit = n - max(ends)
            break
    if limit < allowed:
        return {}
    lost: dict[int, float] = {}
    for end in range(n - 1):  # of an earlier place
        length = 0
        while length <= end and tokens[end - length] == tokens[n - 1 - length]:
            length += 1
        length, following = min(length, limit), tokens[end + 1]
        if length >= allowed and [following] not in [list(breaker) for breaker in breakers]:
            lost[following] = max(lost.get(following, 0), multiplier * base ** (length - allowed))
    return lost


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    window=st.integers(1, 50),
    base=st.sampled_from([1.0, 1.3, 1.75]),
    allowed=st.integers(0, 4),
    breakers=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=2),
)
def test_penalties_on_repetition_are_the_definition(
    tokens: list[int], window: int, base: float, allowed: int, breakers: list[list[int]]
) -> None:
    sampler = Sampler(
        5,  # the last is never there
        temperature=1.0,
        dry_multiplier=0.5,
        dry_base=base,
        dry_allowed_length=allowed,
        dry_window_size=window,
        breakers=breakers,
    )
    for token in tokens:
        sampler.accept(token)
    expected = _dry_oracle(
        tokens[-window:], multiplier=0.5, base=base, allowed=allowed, breakers=breakers
    )
    assert _penalties(sampler) == pytest.approx(expected, rel=1e-5)
    assert _penalties(sampler) == pytest.approx(expected, rel=1e-5)  # nothing is left over


def test_a_long_repetition_does_not_overflow() -> None:
    sampler = Sampler(
        3, temperature=1.0, dry_multiplier=100.0, dry_base=100.0, dry_window_size=4000
    )
    for _ in range(4000):
        sampler.accept(1)
    logits = np.array([0.0, 50.0, -np.inf], np.float32)
    tokens, probabilities = sampler.distribution(logits)
    assert tokens.tolist() == [0, 1] and probabilities.tolist() == [1.0, 0.0]


def _oracle(
    logits: NDArray[np.float32],
    *,
    temperature: float,
    top_n_sigma: float,
    typical_p: float,
    xtc: bool,
    xtc_threshold: float,
    dynatemp_range: float,
    dynatemp_exponent: float,
) -> dict[int, float]:
    """Token -> probability, by the plain definitions in float64."""
    values = logits.astype(np.float64)
    tokens = np.arange(len(values))
    if top_n_sigma > 0:
        floor = values.max() - top_n_sigma * values.std()
        assume(np.abs(values - floor).min() > 1e-5)
        tokens = tokens[values >= floor]
    if typical_p < 1:
        shares = softmax(values[tokens])
        surprise = -np.log(shares)
        distance = np.abs(surprise - shares @ surprise)
        order = np.argsort(distance, kind="stable")
        assume(len(tokens) == 1 or np.diff(distance[order]).min() > 1e-5)
        mass = np.cumsum(shares[order])
        assume(np.abs(mass - typical_p).min() > 1e-9)
        tokens = tokens[order[: int((mass <= typical_p).sum()) + 1]]
    tokens = tokens[np.lexsort((tokens, -values[tokens]))]
    if xtc:
        shares = softmax(values[tokens])
        assume(np.abs(shares - xtc_threshold).min() > 1e-9)
        tokens = tokens[max(0, int((shares >= xtc_threshold).sum()) - 1) :]
    kept = values[tokens]
    if dynatemp_range > 0 and len(kept) > 1:
        shares = softmax(kept)
        evenness = max(0.0, -float(shares @ np.log(shares))) / np.log(len(kept))
        low = max(0.0, temperature - dynatemp_range)
        temperature = low + (temperature + dynatemp_range - low) * evenness**dynatemp_exponent
    return dict(zip(tokens.tolist(), softmax(kept / temperature).tolist(), strict=True))


@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.3, 1.0, 4.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_n_sigma=st.sampled_from([-1.0, 0.0, 0.5, 1.5, 4.0]),
    typical_p=st.sampled_from([1.0, 0.95, 0.6, 1e-6]),
    xtc_probability=st.sampled_from([0.0, 0.3, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    dynatemp_range=st.sampled_from([0.0, 0.25]),
    dynatemp_exponent=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_distribution_is_the_definition(
    seed: int, scale: float, xtc_probability: float, **settings: Any
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(N) * scale).astype(np.float32)
    expected = dict.fromkeys(range(N), 0.0)
    for xtc, share in ((False, 1 - xtc_probability), (True, xtc_probability)):
        if share > 0:
            for token, probability in _oracle(logits, xtc=xtc, **settings).items():
                expected[token] += share * probability
    sampler = Sampler(N, xtc_probability=xtc_probability, **settings)
    found = dict.fromkeys(range(N), 0.0)
    found |= dict(zip(*map(list, sampler.distribution(logits)), strict=True))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_draws_have_their_probabilities() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    sampler = Sampler(4, temperature=1.0, xtc_probability=0.5, xtc_threshold=0.15, seed=1)
    counts = np.bincount([sampler.sample(logits) for _ in range(20_000)], minlength=4)
    # With XTC 2/3 and 1/3 of the last two.
    np.testing.assert_allclose(counts / 20_000, [0.2, 0.15, 0.4333, 0.2167], atol=0.012)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"typical_p": 0}, r"typical_p \(--typical-p\) must be in \(0, 1\], got 0; use 1"),
        ({"xtc_probability": 2}, r"\(--xtc-probability\) must be in \[0, 1\], got 2"),
        ({"xtc_threshold": float("nan")}, r"\(--xtc-threshold\) must be in \[0, 1\], got nan"),
        ({"dynatemp_range": -1}, r"\(--dynatemp-range\) must be a number >= 0, got -1; use 0"),
        ({"dry_base": 0.5}, r"\(--dry-base\) must be a number >= 1, got 0\.5"),
        ({"dry_multiplier": "x"}, r"\(--dry-multiplier\) must be a finite number, got 'x'"),
        ({"dry_penalty_last_n": -2}, r"\(--dry-penalty-last-n\) must be an integer >= -1"),
        ({"dry_sequence_breakers": [""]}, "must be texts of 1 to 40 characters"),
        ({"dry_sequence_breakers": ["x" * 41]}, "must be texts of 1 to 40 characters"),
        ({"dry_sequence_breakers": ["\ud800"]}, "must be texts of 1 to 40 characters"),
        ({"dry_sequence_breakers": 3}, "must be texts of 1 to 40 characters"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        SamplingParams(**settings)


def test_breakers_outside_the_vocabulary_are_refused() -> None:
    for breaker in ((4,), (0, 4), (-1,)):
        with pytest.raises(ValueError, match=r"breakers must be in \[0, 4\)"):
            Sampler(4, temperature=1.0, dry_multiplier=1.0, dry_window_size=8, breakers=[breaker])

"""Rules that choose pages for generated tokens: by hand, and in turn with prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeh2o import QuestConfig, RocketKvConfig, _core
from edgeh2o.errors import UsageError
from tests.ops.attention_case import Shape, decode, make_attention, prefill
from tests.reference.cached_rows import DECODE_ATOL, stored
from tests.reference.pages import largest_bounds
from tests.reference.qkv import random_qkv
from tests.reference.quest import QuestLayer
from tests.reference.rocketkv import keep_rows, page_logits
from tests.sparse.policies import PAGED, PolicyCase

S = 32
UPPER = np.array([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0], [3.0, 1.0]])
LOWER = np.array([[1.0, -1.0], [-1.0, 1.0], [-2.0, -2.0], [1.0, -3.0]])


def test_rows_that_are_kept_by_hand() -> None:
    votes = np.array([0.1, 0.0, 0.3, 0.0, 0.0, 0.6])
    assert keep_rows(votes, window=2, kernel=3, budget=5).tolist() == [1, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("q", "topr", "expected"),
    [
        ([[1, -2]], 2, [[4, -2, 4, 9]]),
        ([[1, -2]], 1, [[2, -2, 4, 6]]),
        ([[1, -2], [-3, 1]], 2, [[3, -3, 2, 7], [-4, 4, 4, -6]]),
    ],
)
def test_logits_of_pages_by_hand(q: Any, topr: int, expected: Any) -> None:
    logits = page_logits(np.array(q, float), UPPER, LOWER, topr, 1.0)
    np.testing.assert_allclose(logits, expected)


def test_bounds_of_logits_by_hand() -> None:
    keys = [[1, 0], [2, -1], [0, 3], [-1, 1], [-2, -2], [0, 0], [1, 1], [3, -3]]
    k = np.array(keys * 8, float)
    assert largest_bounds(np.array([[1.0, -2.0]]), k, 2)[:4] == pytest.approx(
        [4, -2, 4, 9], abs=0.1
    )


@pytest.mark.parametrize("case", PAGED, ids=str)
@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
@pytest.mark.usefixtures("isa")
def test_prompts_and_generated_tokens_take_turns(case: PolicyCase, cache_type: str) -> None:
    shape = Shape(n_kv_heads=2, group=3, head_dim=32)
    qkv = tuple(
        a.astype(np.float16).astype(np.float64) for a in random_qkv(6, n_tokens=560, **shape.heads)
    )
    attention = make_attention(
        case.make_policy(), shape, chunk_size=S, max_context=560, cache_type=cache_type
    )
    cached = [qkv[0], *(stored(a, cache_type) for a in qkv[1:])]
    oracle, begin = case.make_oracle(S), 0
    for n_prompt, n_decoded in [(40, 2), (180, 3), (3, 2), (230, 3)]:
        end = begin + n_prompt
        prefill(attention, tuple(a[:, begin:end] for a in qkv), stays_open=True)
        oracle.prefill(*(a[:, begin:end] for a in cached), is_last=True)
        for position in range(end, end + n_decoded):
            expected = oracle.decode(*(a[:, position : position + 1] for a in cached))
            output = decode(attention, qkv, position)
            np.testing.assert_allclose(output, expected, rtol=0, atol=3 * DECODE_ATOL[cache_type])
        begin = end + n_decoded


@pytest.mark.parametrize("period", [None, 12, 7])
def test_thousands_of_pages_many_of_which_score_alike(period: int | None) -> None:
    """Ties go to the lower page; a sample of one page in twelve may show all that score most."""
    n_tokens, shape = 3072, Shape(n_kv_heads=2, group=2, head_dim=32)
    rng = np.random.default_rng(8)
    q, k, v = random_qkv(7, n_tokens=n_tokens + 2, **shape.heads)
    # Whole numbers of one size: their sums are exact, and their bounds too.
    q, k = np.rint(2 * q), rng.integers(-1, 2, k.shape).astype(np.float64)
    k[:, :, ::32] = 1  # the largest of every block
    if period is not None:
        k[:, ::period] = np.sign(q[::2, -2:-1])
    attention = make_attention(
        _core.quest_policy(tokens=700, page_size=1, dense_layers=0),
        shape,
        chunk_size=1024,
        max_context=n_tokens + 2,
        cache_type="f32",
    )
    oracle = QuestLayer(tokens=700, page_size=1)
    prefill(attention, (q[:, :n_tokens], k[:, :n_tokens], v[:, :n_tokens]), stays_open=True)
    # Its outputs are not looked at: one query is enough.
    oracle.prefill(q[:, n_tokens - 1 : n_tokens], k[:, :n_tokens], v[:, :n_tokens], is_last=True)
    for position in (n_tokens, n_tokens + 1):
        now = slice(position, position + 1)
        expected = oracle.decode(q[:, now], k[:, now], v[:, now])
        output = decode(attention, (q, k, v), position)
        np.testing.assert_allclose(output, expected, rtol=0, atol=DECODE_ATOL["f32"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuestConfig(page_size=0), r"page_size \(--quest-page-size\)"),
        (lambda: QuestConfig(tokens=8), "does not fit into the 8"),
        (lambda: RocketKvConfig(window=2048), "below the prompt budget of 2048"),
        (lambda: RocketKvConfig(kernel=4), "must be odd, got 4"),
        (lambda: RocketKvConfig(topk=0), r"topk \(--rocketkv-topk\)"),
    ],
)
def test_settings_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()

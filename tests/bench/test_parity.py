"""The verdict on a file: each limit alone can fail it."""

from __future__ import annotations

import numpy as np
import pytest

from bench.log_probabilities import Agreement
from bench.parity import GreedyComparison, Tolerances, count_equal, find_faults

ITSELF = Agreement(
    kl_divergence=np.full(4, 3e-3),
    reference_log_probability=np.full(4, -2.0),
    log_probability=np.full(4, -2.05),
    is_same_top=np.array([True, True, True, False]),
)


def make_agreement(
    *, kl: float = 5e-3, difference: float = 0.01, same_tops: int = 3, nan: bool = False
) -> Agreement:
    """Four positions within the limits that follow from ITSELF, unless told otherwise."""
    return Agreement(
        kl_divergence=np.full(4, np.nan if nan else kl),
        reference_log_probability=np.full(4, -2.0),
        log_probability=np.full(4, -2.0 + difference),
        is_same_top=np.arange(4) < same_tops,
    )


def make_answer(gap: float | None) -> GreedyComparison:
    return GreedyComparison(prompt="prose", n_tokens=9, n_equal=5, gap=gap, n_equal_itself=9)


def judge(agreement: Agreement, *, ids: bool = True, gap: float | None = None) -> list[str]:
    return find_faults(
        are_ids_equal=ids,
        agreement=agreement,
        itself=ITSELF,
        greedy=[make_answer(gap)],
        tolerances=Tolerances(),
    )


def test_within_every_limit() -> None:
    assert judge(make_agreement()) == []
    assert judge(make_agreement(), gap=0.09) == []


@pytest.mark.parametrize(
    ("agreement", "fault"),
    [
        (make_agreement(kl=7e-3), "mean KL above 6.0e-03"),
        (make_agreement(nan=True), "mean KL above 6.0e-03"),
        (make_agreement(same_tops=2), "top-1 agreement below 0.720"),
        (make_agreement(difference=0.03), "perplexity off by 2.96%"),
    ],
)
def test_each_limit_alone(agreement: Agreement, fault: str) -> None:
    assert judge(agreement) == [fault]


def test_differences_that_cancel_in_the_perplexity() -> None:
    agreement = make_agreement()
    agreement.log_probability[:] = -2.0 + np.array([0.2, -0.2, 0.2, -0.2])
    assert judge(agreement) == ["mean difference above 0.100"]


def test_ids_have_no_tolerance() -> None:
    assert judge(make_agreement(), ids=False) == ["token ids differ"]


def test_a_greedy_answer_may_part_only_at_a_near_tie() -> None:
    assert judge(make_agreement(), gap=0.11) == ["prose: 0.11 nats at token 5"]


def test_exact_weights_have_limits_of_their_own() -> None:
    """Where llama.cpp hardly differs from itself, the absolute limits hold."""
    exact = Agreement(
        kl_divergence=np.full(4, 1e-7),
        reference_log_probability=np.full(4, -2.0),
        log_probability=np.full(4, -2.0),
        is_same_top=np.full(4, True),
    )
    options = {"are_ids_equal": True, "itself": exact, "greedy": (), "tolerances": Tolerances()}
    near = make_agreement(kl=9e-5, difference=0.009, same_tops=4)
    assert find_faults(agreement=near, **options) == []
    parted = options | {"greedy": [make_answer(0.06)]}
    assert find_faults(agreement=near, **parted) == ["prose: 0.06 nats at token 5"]
    far = make_agreement(kl=2e-4, difference=0.009, same_tops=4)
    assert find_faults(agreement=far, **options) == ["mean KL above 1.0e-04"]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0)],
)
def test_common_beginning(left: list[int], right: list[int], expected: int) -> None:
    assert count_equal(left, right) == expected

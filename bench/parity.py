"""What agreement with llama.cpp is asked for, and the verdict on one model file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .log_probabilities import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """How far from llama.cpp a right answer may be. Token ids must be equal.

    Both sides round activations to 8 bits before every product with quantised weights, and a
    change in the last bit of a sum then flips roundings in every later layer. llama.cpp with
    flash attention differs from itself without it for the same reason, so ``spread`` times that
    distance is allowed, but at least ``least_kl`` and ``least_difference`` nats, which hold for
    F16 and F32 weights, where nothing is rounded to 8 bits. ``top_agreement`` is how much lower
    the share of equal first choices may be, and ``perplexity`` is relative. Greedy answers may
    part where we prefer our token by no more nats than ``spread`` times the largest distance of
    llama.cpp from itself, at least ``least_gap``.
    """

    spread: float = 2.0
    least_kl: float = 1e-4
    least_difference: float = 0.01
    top_agreement: float = 0.03
    perplexity: float = 0.02
    least_gap: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyComparison:
    """Greedy tokens of one prompt.

    ``n_equal`` first tokens of ``n_tokens`` are equal to llama.cpp's; ``gap`` is by how many nats
    we prefer our token at the first difference, None without one. It is read from a new prefill
    of prompt and answer, which rounds differently than decoding did, so it may be negative.
    ``n_equal_itself`` compares llama.cpp with itself, flash attention on against off.
    """

    prompt: str
    n_tokens: int
    n_equal: int
    gap: float | None
    n_equal_itself: int


def count_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def find_faults(
    *,
    are_ids_equal: bool,
    agreement: Agreement,
    itself: Agreement,
    greedy: Sequence[GreedyComparison],
    tolerances: Tolerances,
) -> list[str]:
    """Every limit that is exceeded, in words; empty when the two agree.

    ``agreement`` is ours with llama.cpp, ``itself`` is llama.cpp's with another of its own runs.
    """
    kl_limit = max(tolerances.least_kl, tolerances.spread * itself.mean_kl)
    difference_limit = max(tolerances.least_difference, tolerances.spread * itself.mean_difference)
    top_limit = itself.top_agreement - tolerances.top_agreement
    gap_limit = max(tolerances.least_gap, tolerances.spread * float(itself.differences.max()))
    off = abs(agreement.perplexity / agreement.reference_perplexity - 1)
    # Written so that a NaN is a fault too.
    checks = [
        (are_ids_equal, "token ids differ"),
        (agreement.mean_kl <= kl_limit, f"mean KL above {kl_limit:.1e}"),
        (
            agreement.mean_difference <= difference_limit,
            f"mean difference above {difference_limit:.3f}",
        ),
        (agreement.top_agreement >= top_limit, f"top-1 agreement below {top_limit:.3f}"),
        (off <= tolerances.perplexity, f"perplexity off by {off:.2%}"),
    ]
    faults = [fault for is_met, fault in checks if not is_met]
    for answer in greedy:
        if answer.gap is not None and not answer.gap <= gap_limit:
            faults.append(f"{answer.prompt}: {answer.gap:.2f} nats at token {answer.n_equal}")
    return faults

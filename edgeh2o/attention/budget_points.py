"""How many keys a prompt gets by its length, from what is known of some lengths."""

from __future__ import annotations

import math

# Mean keys that serve prompts of some lengths: (tokens, keys), which ascend together.
Points = tuple[tuple[int, int], ...]

# Tokens of a prompt up to which the default budget was shown to be harmless.
SHOWN_LENGTH = 4096
# Of a budget, for every doubling of the prompt beyond what is known: with 1,024 keys prompts of
# 8,192 tokens lost up to 1.3 %, with 1,536 no more than the default may (docs/quality.md).
GROWTH = 1.5
BUDGET_STEP = 64


def budget_of_length(points: Points, n_tokens: int) -> int:
    """Mean keys of a prompt of ``n_tokens``, by the ``points``, one at least, that are known.

    Shorter prompts than those have the keys of the first. Between two, a doubling of the prompt
    multiplies them by as much wherever it lies, and by 1.5 beyond the last and 4,096 tokens. In
    steps of 64; beyond the last point never more than the prompt has.
    """
    n_below = sum(length <= n_tokens for length, _ in points)
    start, keys = points[max(0, n_below - 1)]
    if n_below < len(points):
        end, most = points[n_below]
        growth, doublings = most / keys, math.log2(end / start)
    else:
        start, most = max(start, SHOWN_LENGTH), n_tokens
        growth, doublings = GROWTH, 1.0
    if n_tokens <= start:
        return keys
    grown: float = keys * growth ** (math.log2(n_tokens / start) / doublings)
    # A last bit that rounding added is no reason for another step.
    steps = math.ceil(round(grown / BUDGET_STEP, 6))
    return max(keys, min(steps * BUDGET_STEP, most))

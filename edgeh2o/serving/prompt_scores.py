"""What a model gives the tokens of a prompt itself, for requests that want them echoed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..engine.generate import log_probability
from ..engine.logits import TopLogProbabilities
from ..engine.memory_fit import check_start
from .call_grid import PromptShape

if TYPE_CHECKING:
    from .conversations import ConversationPool

# Rows of logits at a time: 39 MB of them with a vocabulary of 152,000.
ROWS_AT_ONCE = 64

# The natural logarithm of a token's probability, and the most likely in its place by their ids.
Score = tuple[float, list[tuple[int, float]]]


def score_prompt(
    pool: ConversationPool,
    ids: Sequence[int],
    n_top: int,
    *,
    adapter_scales: tuple[float, ...],
    max_tokens: int,
    n_question: int,
    require: Callable[[], None],
) -> Iterator[Score]:
    """Scores of all tokens but the first one, which nothing comes before.

    The prompt is read in a session of its own, in the calls in which its answer's session reads it.
    ``require`` raises once the request is not wanted any more. Raises ResourceError for what does
    not fit in memory.
    """
    plan, _ = pool.plan_of(len(ids), max_tokens)
    plan = plan.with_adapters(adapter_scales)
    model, shape = pool.model.model, plan.shape(len(ids), all_rows=True)
    n_bytes = sum(pool.model.estimate_session_bytes(plan.attention, shape).values())
    with pool.reserve(n_bytes, require):
        check_start(plan, model, shape)
        runner = model.start_session(plan.attention, shape)
        tokens, call = np.asarray(ids, np.int32), pool.scheduler.call
        grid = pool.model.call_grid(plan.attention, shape)
        ends = grid.ends(0, len(ids), PromptShape(len(ids), n_question), 0, is_last=True)
        for begin, end in pairwise([0, *ends]):
            require()
            is_last = end == len(ids)
            call(partial(runner.prefill, tokens[begin:end], is_last=is_last))
            # Each row says what comes after its token: that of the last one is the answer's.
            for first in range(begin, min(end, len(ids) - 1), ROWS_AT_ONCE):
                n_rows = min(first + ROWS_AT_ONCE, end, len(ids) - 1) - first
                rows = call(partial(runner.row_logits, first - begin, n_rows))
                for row, token in zip(rows, ids[first + 1 :], strict=False):
                    top = TopLogProbabilities(n_top)
                    top.process(row)
                    yield log_probability(row, token), top.records[0]

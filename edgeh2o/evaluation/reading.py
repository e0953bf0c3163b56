"""Driving a runner by hand: a prompt in batches and an answer to it, as evaluations need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engine.generate import log_probability
from ..runners.runner_calls import plan_calls

if TYPE_CHECKING:
    from ..llm import LLM
    from ..runners.base import Runner


def prefill_prompt(
    runner: Runner, tokens: NDArray[np.int32], *, n_read: int = 0, stays_open: bool = False
) -> NDArray[np.float32]:
    """Reads ``tokens`` [n] after the first ``n_read`` of the prompt; gives the logits at the end.

    Forgets the prompt before unless it goes on from there, which takes ``stays_open``.
    """
    if n_read == 0:
        runner.reset()
    logits = None
    for call in plan_calls(n_read, n_read + len(tokens), runner):
        part = tokens[call.start - n_read : call.stop - n_read]
        is_last = call.stop == n_read + len(tokens)
        logits = runner.prefill(part, is_last=is_last, stays_open=stays_open)
    if logits is None:
        raise ValueError("a prompt needs at least one token")
    return logits


def split_answer(llm: LLM, ending: str, answer: str) -> tuple[NDArray[np.int32], list[int]]:
    """Tokens of a prompt's ``ending``, and of the answer as they follow it.

    A blank with a token of its own belongs to the prompt: what is asked for is the answer, and not
    whether the model would rather begin with another word.
    """
    alone = llm.tokenize(ending, add_special=False)
    joined = llm.tokenize(ending + answer, add_special=False)
    n_shared = 0
    while n_shared < len(alone) and alone[n_shared] == joined[n_shared]:
        n_shared += 1
    while n_shared + 1 < len(joined) and llm.detokenize(joined[n_shared:][:1]).isspace():
        n_shared += 1
    return np.array(joined[:n_shared], dtype=np.int32), joined[n_shared:]


def score_answer(
    runner: Runner, logits: NDArray[np.float32], answer: Sequence[int]
) -> tuple[bool, float]:
    """Whether the most likely tokens are the answer's, and the mean log-probability of those.

    ``logits`` [vocab_size] are those after the prompt.
    """
    logprobs, is_exact = [], True
    for index, token in enumerate(answer):
        if index:
            logits = runner.decode(answer[index - 1])
        logprobs.append(log_probability(logits, token))
        is_exact &= int(logits.argmax()) == token
    return is_exact, float(np.mean(logprobs))

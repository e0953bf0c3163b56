"""Which positions of a text generated tokens read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .reading import prefill_prompt

if TYPE_CHECKING:
    from ..llm import LLM

# Last tokens of a text that are decoded, no more than half of it.
DECODED_TOKENS = 64


def record_reads(
    llm: LLM, tokens: NDArray[np.int32], *, on_tokens: Callable[[int], None] | None = None
) -> NDArray[np.float64] | None:
    """By KV head of every layer, the share of decoded tokens that read a position: [n_slots, n].

    The last of ``tokens`` [n] are decoded as they stand, the others are the prompt; of a position
    among them those count that come no earlier. None for runners that do not note what they read.
    ``on_tokens(n)`` is called once for the prompt, and after every decoded token.
    """
    n_decoded = min(DECODED_TOKENS, len(tokens) // 2)
    runner: Any = llm.start_runner(len(tokens))
    if not hasattr(runner, "note_reads"):
        return None
    prompt, rest = np.split(tokens, [len(tokens) - n_decoded])
    prefill_prompt(runner, prompt)
    if on_tokens is not None:
        on_tokens(len(prompt))
    runner.note_reads(True)
    counts: NDArray[np.float64] | None = None
    for token in rest:
        runner.decode(int(token))
        if counts is None:
            counts = np.zeros((len(runner.reads), len(tokens)))
        for row, positions in zip(counts, runner.reads, strict=True):
            row[positions] += 1
        if on_tokens is not None:
            on_tokens(1)
    return None if counts is None else counts / np.minimum(n_decoded, np.arange(len(tokens), 0, -1))

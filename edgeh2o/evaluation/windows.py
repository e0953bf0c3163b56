"""Windows of a text, cut as llama-perplexity cuts them, and the ranges that are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

if TYPE_CHECKING:
    from ..llm import LLM

DEFAULT_CONTEXT = 4096
LAST_TOKENS = 1024
DEFAULT_SKIP = 1024
MIN_WINDOW = 3  # two predicted tokens: one has no standard error


def cut_windows(llm: LLM, text: str, size: int, count: int | None) -> NDArray[np.int32]:
    """The first ``count`` (None: all) windows of ``size`` tokens of ``text``: int32 [n, size].

    Control tokens in the text are taken literally. A model that begins its prompts with BOS gets
    it as the first token of every window, in the place of the token there. Raises UsageError when
    the text is too short.
    """
    if size < MIN_WINDOW:
        raise UsageError(f"a window needs at least {MIN_WINDOW} tokens, got {size}")
    if count is not None and count < 1:
        raise UsageError(f"the number of windows must be at least 1, got {count}")
    tokens = np.array(llm.tokenize(text, parse_special=False), dtype=np.int32)
    n_available = len(tokens) // size
    wanted = count or 1
    if n_available < wanted:
        windows_of = "a window" if wanted == 1 else f"{wanted} windows"
        raise UsageError(
            f"the text has {len(tokens)} tokens, too few for {windows_of} of {size}; "
            "give a longer text, or fewer or smaller windows"
        )
    n_windows = count or n_available
    windows = tokens[: n_windows * size].reshape(n_windows, size)
    first = find_beginning(llm)
    if first is not None:
        windows[:, 0] = first
    return windows


def choose_window_size(llm: LLM, requested: int | None) -> int:
    """Tokens of a window: ``requested``, 0 for the model's trained length, None for 4,096."""
    trained = llm.config.context_length
    return min(trained, DEFAULT_CONTEXT) if requested is None else requested or trained


def find_beginning(llm: LLM) -> int | None:
    """The token that the model puts before every prompt, None if there is none."""
    plain, special = llm.tokenize("a", add_special=False), llm.tokenize("a")
    return special[0] if special[:1] != plain[:1] else None


def scored_ranges(window_size: int, skip: int) -> Mapping[str, tuple[int, int]]:
    """Ranges [first, last) of a window's predicted tokens, by name.

    The i-th predicted token is the one at position i + 1. "second half" is what llama-perplexity
    scores. Ranges with less than two tokens, and repetitions of "all", are left out.
    """
    n_predicted = window_size - 1
    ranges = {
        "all": (0, n_predicted),
        f"after {skip}": (skip, n_predicted),
        f"last {LAST_TOKENS}": (n_predicted - LAST_TOKENS, n_predicted),
        "second half": (window_size // 2, n_predicted),
    }
    return {
        name: (first, last)
        for name, (first, last) in ranges.items()
        if last - first >= 2 and (first > 0 or name == "all")
    }

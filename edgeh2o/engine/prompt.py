"""Checks of a prompt before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..tokenizer import Tokenizer

TokenIds: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"

# Prompts up to this length are counted exactly before they are refused: that takes a moment.
CHEAP_PROMPT_TOKENS = 2**17


def refuse_hopeless_length(prompt: str | TokenIds, tokenizer: Tokenizer, limit: int) -> None:
    """Raises UsageError for what no context holds, before it is tokenised or copied.

    ``limit`` is the longest context there can be, in tokens.
    """
    least = tokenizer.count_at_least(prompt) if isinstance(prompt, str) else len(prompt)
    if least > max(limit, CHEAP_PROMPT_TOKENS):
        raise UsageError(
            f"the prompt has at least {least} tokens and the context holds {limit}; shorten it"
        )


def check_token_ids(token_ids: TokenIds, vocab_size: int) -> NDArray[np.int32]:
    """The ids as an array [n]. Raises UsageError for one outside the vocabulary."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UsageError(
            "a prompt is text or a flat sequence of integer token ids, got "
            f"{ids.ndim} dimensions of {ids.dtype}"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        index = int(outside[0])
        raise UsageError(
            f"token id {ids[index]} at index {index} is outside the vocabulary "
            f"of {vocab_size} tokens"
        )
    return ids.astype(np.int32)

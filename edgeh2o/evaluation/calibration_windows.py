"""Windows on which ``calibrate`` measures what a table loses: others than it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError
from .long_texts import KINDS, Window, make_window

if TYPE_CHECKING:
    from ..llm import LLM

# Of one length, by kind of text.
Windows = Mapping[str, Sequence[Window]]

_SEEDS = (0, 1)
# What loses most comes first, so that too small a budget is given up early: of prompts pairs, of
# generated tokens dialogues.
_FIRST_KINDS = ("pairs", "dialogue", "facts", "table")
# Of twice the length, where budgets grow, by one seed.
_LONG_KINDS = ("pairs", "facts", "dialogue")


def make_windows(llm: LLM, length: int) -> Windows:
    """Two windows of ``length`` tokens of every kind of text.

    Raises UsageError for a length that the texts do not fill.
    """
    kinds = [kind for kind in _FIRST_KINDS if kind in KINDS]
    kinds += [kind for kind in KINDS if kind not in _FIRST_KINDS]
    return {kind: [make_window(llm, kind, length, seed=seed) for seed in _SEEDS] for kind in kinds}


def make_long_windows(llm: LLM, length: int) -> Windows:
    """A window of ``length`` tokens of each kind that loses most.

    None where the texts do not fill that, or the model was not trained on it.
    """
    if length > llm.config.context_length:
        return {}
    try:
        return {kind: [make_window(llm, kind, length, seed=0)] for kind in _LONG_KINDS}
    except UsageError:
        return {}


def count_windows(windows: Windows) -> int:
    """Those of all kinds."""
    return sum(map(len, windows.values()))


def window_length(windows: Windows) -> int:
    """Tokens of each."""
    return len(next(iter(windows.values()))[0])


def beginning_with(kind: str, windows: Windows) -> Windows:
    """The same with one kind before the others."""
    return {kind: windows[kind], **windows}

"""Where the question of a prompt begins: what comes before it may be asked about again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..engine.prompt import Prompt

# Characters from the question on, beyond which it is no question: they are tokenised once more.
MOST_CHARACTERS = 8192
# A message up to this length is a question as a whole.
SHORT_MESSAGE = 1024
_BREAKS = ("\n\n", "\n")


def count_question(prompt: Prompt, messages: Sequence[Mapping[str, Any]] = ()) -> int:
    """Tokens of a prompt from its question on; 0 if it has none that can be told apart.

    The question is the last of ``messages`` if that is short, else its last paragraph, or that of a
    prompt without messages; where there is but one paragraph, the last line.
    """
    if prompt.transcript is None:
        return 0
    text = prompt.transcript.prompt
    begin = _find_question(text, messages[-1]["content"] if messages else None)
    if begin is None or begin == 0 or len(text) - begin > MOST_CHARACTERS:
        return 0
    ids, last = prompt.encode(), prompt.encode_from(begin)
    if not last or len(last) >= len(ids) or not np.array_equal(ids[-len(last) :], last):
        return 0  # a token reaches across
    return len(last)


def _find_question(text: str, content: object) -> int | None:
    """The index in ``text`` of its question."""
    is_message = isinstance(content, str)
    whole = content.strip() if isinstance(content, str) else text.rstrip()
    nearest = whole[-MOST_CHARACTERS:]
    if is_message and len(whole) <= SHORT_MESSAGE:
        question = whole
    else:
        breaks = [each for each in _BREAKS if each in nearest]
        question = nearest.rpartition(breaks[0])[2] if breaks else ""
    question = question.strip()
    begin = text.rfind(question) if question else -1
    return begin if begin >= 0 else None

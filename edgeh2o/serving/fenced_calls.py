"""Calls in a fence of Markdown at the beginning of an answer, as Qwen2.5-Coder writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence

FENCE = "```"
_BEGINS = (f"{FENCE}json\n", f"{FENCE}\n")


def may_be_fence(text: str) -> bool:
    """Whether ``text`` is the beginning of a line that begins such a fence."""
    return any(begin.startswith(text) for begin in _BEGINS)


def fence_of(text: str) -> str:
    """The line with which ``text`` begins, "" if it is no fence."""
    return next((begin for begin in _BEGINS if text.startswith(begin)), "")


def may_be_call(body: str, names: Sequence[str]) -> bool:
    """Whether what stands in a fence is, as far as it goes, a call or a list of calls."""
    compact = "".join(body.lstrip().removeprefix("[")[:1024].split())
    calls = [f'{{"name":"{name}"' for name in names]
    return any(call.startswith(compact) or compact.startswith(call) for call in calls)


def split_fence(body: str) -> tuple[str, str] | None:
    """The JSON of a fence and what follows it; None before its end. A text in it may have fences.

    Raises ValueError where something else stands between the JSON and the end.
    """
    if FENCE not in body:
        return None
    begin = len(body) - len(body.lstrip())
    try:
        end = json.JSONDecoder().raw_decode(body, begin)[1]
    except (ValueError, RecursionError):
        return None
    after = body[end:].lstrip()
    if after.startswith(FENCE):
        return body[begin:end], after.removeprefix(FENCE)
    if FENCE.startswith(after):
        return None
    raise ValueError("no end of a fence behind its JSON")

"""What session files hold of budgets of heads: how it is written, and taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..option_fields import MAX_CONTEXT
from .head_budgets import NO_TABLE
from .headwise_settings import DECODE_FROM, HeadwiseSettings, is_positive_int

# The source of budgets of a session file, which came from a table, or from prompts.
HELD, HELD_PROFILE = "session", "session (profile)"
HELD_DENSE = "dense: as the saved session was"  # how statistics name both without any limit


def move_decode(values: dict[str, Any]) -> None:
    """Puts what settings say of decode, as fields, where session files have it."""
    names = ("decode_attention", "decode_pages", "decode_budgets", "decode_from")
    way, pages, budgets, least = (values.pop(name) for name in names)
    if way == "headwise":  # else as in session files that know of nothing else
        values["decode"] = {"attention": way, "pages": pages, "budgets": budgets}
        if least != DECODE_FROM:  # as in those of versions that knew no other
            values["decode"]["from"] = least


def saved_decode_from(saved: Mapping[str, Any]) -> int:
    """From how many tokens of a prompt on they do so, by what ``to_dict`` gave."""
    decode = saved.get("decode")
    least = decode.get("from") if isinstance(decode, Mapping) else None
    if isinstance(least, int) and DECODE_FROM <= least <= MAX_CONTEXT:
        return least
    return DECODE_FROM


def fields_held(settings: HeadwiseSettings, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that ``to_dict`` of a saved attention, and ``is_taught`` of its file, set.

    There are none of what ``settings`` cannot go on with.
    """
    decode = _decode_held(settings, saved)
    if _is_chosen_by_hand(settings):
        if decode["decode_attention"] == "headwise":  # as it was asked for
            decode["decode_attention"] = settings.decode_attention
        return {**decode, "decode_budgets": settings.decode_budgets}
    budgets, budget, max_past = (saved.get(n) for n in ("budgets", "budget", "max_past"))
    decode_budgets = decode["decode_budgets"]
    if not isinstance(budgets, list) or not budgets:
        return {}
    if not isinstance(decode_budgets, list | None):
        return {}
    counts = [n for n in (*budgets, *(decode_budgets or ()), budget) if n is not None]
    if not all(map(is_positive_int, counts)) or max_past not in (0, settings.max_past):
        return {}
    if settings.budget is not None and budget != settings.budget:
        return {}
    return {
        **decode,
        "budgets": tuple(budgets),
        "decode_budgets": None if decode_budgets is None else tuple(decode_budgets),
        "by_query_head": saved.get("by_query_head") is True,
        "budget": budget,
        "max_past": max_past,
        # A file that does not say where they came from is judged by the stricter limit.
        "source": HELD if saved.get("is_taught") is False else HELD_PROFILE,
    }


def _decode_held(settings: HeadwiseSettings, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Those of generated tokens; ``decode_budgets`` unchecked."""
    held = saved.get("decode")
    way, least = settings.decode_attention, settings.decode_from
    budgets = held.get("budgets") if isinstance(held, Mapping) else None
    if way == "auto":
        way = "dense" if budgets is None else "headwise"
        least = saved_decode_from(saved) if isinstance(held, Mapping) else least
    return {"decode_attention": way, "decode_budgets": budgets, "decode_from": least}


def _is_chosen_by_hand(settings: HeadwiseSettings) -> bool:
    is_table = settings.budget_table not in (None, NO_TABLE)
    return is_table or settings.budgets is not None or settings.max_loss is not None

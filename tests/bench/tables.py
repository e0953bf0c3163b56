"""Rows of the tables that scripts print."""

from __future__ import annotations


def cells_of(row: str) -> list[str]:
    """What stands between the bars."""
    return [cell.strip() for cell in row.strip("|").split("|")]

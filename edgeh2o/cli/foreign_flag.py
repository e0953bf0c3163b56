"""What becomes of a flag of another program."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

ZERO, ONE = ("0", "0.0", "0.00"), ("1", "1.0", "1.00")


class Flag(NamedTuple):
    """``note`` says why there is no such flag; ``becomes`` is our flag that means the same.

    ``takes`` "" or "value", or "switch": a word such as on or off may follow. ``idle`` are the
    values that change nothing; None are all. ``spell`` turns a value into that of our flag.
    """

    note: str
    takes: str = ""
    becomes: str = ""
    idle: tuple[str, ...] | None = ()
    spell: Callable[[str], str] = str

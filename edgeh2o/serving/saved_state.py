"""The state of a ``SharedRunner`` as bytes: that of its runner, and where prompts were read.

Layout: the length of the header (u32, little-endian), the header in JSON, the state of the runner.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .call_grid import CallGrid, PromptShape, ReadPlaces

_LENGTH_BYTES = 4
MAX_HEADER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class SavedPlaces:
    """Where prompts were read, and where the last one ended that was read to its end."""

    places: ReadPlaces
    whole_end: int | None

    def count_usable(self, n_common: int, shape: PromptShape, grid: CallGrid) -> int:
        """Tokens of a prompt that need not be read again, if so many are alike."""
        end = self.whole_end
        if end is not None and (n_common > end or n_common == end == shape.n_tokens):
            return n_common if n_common < shape.n_tokens or n_common == end else n_common - 1
        most = n_common if end is None else min(n_common, end - 1)
        return grid.last_mark(self.places.marks, most, shape, self.places)


def pack_state(saved: SavedPlaces, state: bytes) -> bytes:
    """All of it as bytes."""
    header = json.dumps(
        {
            "marks": saved.places.marks,
            "turns": saved.places.turns,
            "questions": saved.places.questions,
            "whole_end": saved.whole_end,
        }
    ).encode("ascii")
    length = len(header).to_bytes(_LENGTH_BYTES, "little")
    return b"".join([length, header, state])


def unpack_state(data: bytes, n_tokens: int) -> tuple[SavedPlaces, bytes]:
    """What ``pack_state`` was given, of so many tokens. Raises ValueError for anything else."""
    header, begin = _read_header(data)
    saved = _places_of(header)
    places = saved.places
    if max((*places.marks, *places.turns, *places.questions, saved.whole_end or 0)) > n_tokens:
        raise ValueError(f"its positions are beyond its {n_tokens} tokens")
    return saved, data[begin:]


def read_places(data: bytes) -> SavedPlaces:
    """Of the beginning of such bytes. Raises ValueError if they are none."""
    return _places_of(_read_header(data)[0])


def _read_header(data: bytes) -> tuple[dict[str, Any], int]:
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if begin > min(len(data), MAX_HEADER_BYTES):
        raise ValueError("it has no header")
    try:
        header = json.loads(data[_LENGTH_BYTES:begin])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ValueError("its header is not JSON")
    return header, begin


def _places_of(header: dict[str, Any]) -> SavedPlaces:
    marks, turns, questions = (
        tuple(_integers(header, name)) for name in ("marks", "turns", "questions")
    )
    if not turns or turns[0] != 0:
        raise ValueError("its first turn does not begin at 0")
    whole_end = header.get("whole_end")
    if whole_end is not None and (type(whole_end) is not int or whole_end < 0):
        raise ValueError("its end cannot be")
    return SavedPlaces(ReadPlaces(marks, turns, questions), whole_end)


def _integers(header: dict[str, Any], name: str) -> list[int]:
    """An ascending list of positions."""
    values = header.get(name)
    if not isinstance(values, list) or any(type(each) is not int or each < 0 for each in values):
        raise ValueError(f"its {name} are no list of numbers")
    if any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"its {name} do not ascend")
    return values

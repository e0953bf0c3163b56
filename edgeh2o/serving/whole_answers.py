"""Whole answers as JSON, made where nobody waits for it.

The probabilities of a long answer take a third of a second, in which the loop would send nothing
to other clients.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from .answer_format import AnswerFormat, Chunk
from .event_flow import WholeAnswer

# Tokens, those that might have stood in their place included, that are written in the loop: about
# 3 ms.
MOST_IN_LOOP = 1000
# Objects and lists within each other, from the outermost to the tokens of an answer (choices,
# choice, logprobs, content), that are written one value at a time.
_MOST_NESTED = 5
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def write_answers(
    forms: Sequence[AnswerFormat],
    told: Sequence[WholeAnswer],
    join: Callable[[Sequence[Chunk]], object],
) -> bytes:
    """The answers ``told``, each by its form, as JSON; ``join`` makes one object of several."""

    def write() -> bytes:
        said = [form.whole(*answer) for form, answer in zip(forms, told, strict=True)]
        return encode_json(said[0] if len(said) == 1 else join(said))

    if sum(map(_count_tokens, told)) <= MOST_IN_LOOP:
        return write()
    return await asyncio.to_thread(write)


def _count_tokens(answer: WholeAnswer) -> int:
    """Those of which probabilities are told."""
    records = (piece.record for piece in answer[0])
    return sum(1 + len(record.top) for record in records if record is not None)


def encode_json(value: object) -> bytes:
    """As Starlette's ``JSONResponse`` has it, in steps that let other threads run.

    The encoder of the standard library keeps the interpreter to itself until it is done. Raises
    ValueError for numbers that are none.
    """
    parts: list[str] = []
    _write(value, parts, _MOST_NESTED)
    return "".join(parts).encode("utf-8")


def _write(value: object, parts: list[str], n_levels: int) -> None:
    if n_levels and isinstance(value, dict) and value and all(type(key) is str for key in value):
        separator = "{"
        for key, item in value.items():
            parts.append(f"{separator}{_dumps(key)}:")
            _write(item, parts, n_levels - 1)
            separator = ","
        parts.append("}")
    elif n_levels and isinstance(value, list) and value:
        separator = "["
        for item in value:
            parts.append(separator)
            _write(item, parts, n_levels - 1)
            separator = ","
        parts.append("]")
    else:
        parts.append(_dumps(value))

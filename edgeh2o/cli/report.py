"""Prints reports: nested plain values as aligned text, or as JSON."""

from __future__ import annotations

import argparse
import codecs
import json
from collections.abc import Iterator, Mapping
from typing import Any

NAMES_OF_FILES = "edgeh2o-names"


def _read_name(error: UnicodeError) -> tuple[bytes, int]:
    """A name of UTF-8 where the locale is another: Python has a lone surrogate for every byte."""
    assert isinstance(error, UnicodeEncodeError)
    part = error.object[error.start : error.end]
    try:
        name = part.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # others, which JSON may have
        name = "?" * len(part)
    return name.encode(), error.end


codecs.register_error(NAMES_OF_FILES, _read_name)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")


def print_report(report: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints ``report`` to stdout."""
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print("\n".join(_lines(report, 0)))


def _lines(values: Mapping[str, Any], depth: int) -> Iterator[str]:
    margin = "  " * depth
    named = [(_text(name), value) for name, value in values.items()]
    width = max((len(name) for name, _ in named), default=0)
    for name, value in named:
        if isinstance(value, Mapping) and value:
            yield f"{margin}{name}:"
            yield from _lines(value, depth + 1)
        else:
            yield f"{margin}{name:<{width}}  {_text(value)}"


def _text(value: object) -> str:
    if isinstance(value, (list, tuple, Mapping)):
        return ", ".join(_text(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return printable(str(value))


def printable(text: str) -> str:
    """``text`` without control characters: names come from files nobody vouches for."""
    text = text.encode("utf-8", NAMES_OF_FILES).decode("utf-8")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

"""Lines typed at a terminal; what is pasted is one line, however many it has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Terminals mark what is pasted between the first two when asked to (bracketed paste).
_PASTE_BEGINS, _PASTE_ENDS = "\x1b[200~", "\x1b[201~"
_MARK_PASTES, _MARK_NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"


@contextmanager
def line_editing() -> Iterator[None]:
    """Gives ``read_line`` a history and editing where readline can be had."""
    marks_pastes = True
    try:
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
        marks_pastes = not sys.stdout.isatty()  # input() leaves readline out then
    except ImportError:
        pass
    marks_pastes = marks_pastes and sys.stderr.isatty()
    try:
        if marks_pastes:
            print(end=_MARK_PASTES, file=sys.stderr, flush=True)
        yield
    finally:
        if marks_pastes:
            print(end=_MARK_NO_PASTES, file=sys.stderr, flush=True)


def read_line(prompt: str) -> str:
    """What is typed or pasted until Enter, without newlines at its end. Raises EOFError."""
    text = input(prompt)
    while _PASTE_BEGINS in text and _PASTE_ENDS not in text:
        text += "\n" + input()
    return text.replace(_PASTE_BEGINS, "").replace(_PASTE_ENDS, "").rstrip("\n")

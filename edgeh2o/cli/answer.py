"""Prints an answer as it is generated, also when Ctrl-C ends it early."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .progress import ProgressBars

if TYPE_CHECKING:
    from ..engine.access import GenerationStream


def print_answer(stream: GenerationStream, bars: ProgressBars, *, silent: bool = False) -> bool:
    """Reads ``stream`` to its end, writing to stdout unless ``silent``; False on Ctrl-C."""
    is_complete = True
    last_text = ""
    try:
        for chunk in stream:
            bars.close()
            last_text = chunk.text or last_text
            if chunk.text and not silent:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        is_complete = False
    bars.close()
    if last_text and not last_text.endswith("\n") and not silent:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return is_complete

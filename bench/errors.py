"""What goes wrong outside edgeh2o: one exception, shown as one line."""

from __future__ import annotations


class LlamaCppError(Exception):
    """A llama.cpp program is missing, failed, or wrote something that was not understood."""

"""KL divergences by text, as measurements of a budget table hold them in its file."""

from __future__ import annotations

from typing import Any


def read_divergences(data: Any, measured: str) -> dict[str, float]:
    """The ``kl`` of a measurement of ``measured``. Raises ValueError for what holds none."""
    if not isinstance(data, dict) or not isinstance(data.get("kl"), dict) or not data["kl"]:
        raise ValueError(f"its measurement of {measured} is no object with divergences")
    return {str(text): float(value) for text, value in data["kl"].items()}

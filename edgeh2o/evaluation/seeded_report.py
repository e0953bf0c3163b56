"""What reports have alike that compare a sparse with a dense prefill on texts made by seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ..attention.base import describe_settings
from .reporting import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededReport:
    """Texts of ``context`` tokens, one per seed; ``keys_per_query`` over all of them.

    Attributes:
        text_name: what a text is called, in the singular.
    """

    text_name: ClassVar[str]

    model: str
    attention: dict[str, Any]
    context: int
    seeds: tuple[int, ...]
    keys_per_query: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, fit for JSON."""
        return asdict(self)

    def _records_of(self, rows: Sequence[Any]) -> list[dict[str, Any]]:
        """One flat record per row, a dataclass."""
        shared = {
            "model": self.model,
            "attention": describe_settings(self.attention),
            "context": self.context,
            f"{self.text_name}s": len(self.seeds),
            "keys_per_query": self.keys_per_query,
        }
        return [shared | asdict(row) for row in rows]

    def _heading(self, of_what: str) -> str:
        """How many texts ``of_what``, read by which attention."""
        return (
            f"{self.model}: {format_count(len(self.seeds), self.text_name)} of {self.context:,} "
            f"tokens {of_what}\n{describe_settings(self.attention)}: "
            f"{self.keys_per_query:,.0f} keys per query"
        )

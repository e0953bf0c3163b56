"""How a tensor of GGUF is made of stored ones, where it is not one of them as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

# Factors of rows that follow each other, as many as a size says; of all rows for "".
Factors: TypeAlias = Sequence[tuple[str, float]]
# Which rows of a matrix of n rows become a tensor, in its order. Sizes are those of
# ``Hyperparameters.sizes``. Raises ValueError for a number of rows that it cannot be.
Order: TypeAlias = Callable[[int, Mapping[str, int]], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A stored tensor, and what is done with it.

    Attributes:
        name: in the checkpoint, whole. It may contain {layer}, and {expert} where every expert has
            one.
        stacked: size that says how many matrices lie one below the other in it.
        rows, columns: those of every matrix that are taken, and in which order; None for all.
        is_transposed: what is taken is turned around.
        change: of the numbers: one more than they are, or minus their exponentials.
        factors: name of factors of its rows, which settings say.
        scales: name of the scales, where the tensor holds blocks of MXFP4.
    """

    name: str
    stacked: str = ""
    rows: Order | None = None
    columns: Order | None = None
    is_transposed: bool = False
    change: Literal["none", "add_one", "minus_exp"] = "none"
    factors: str = ""
    scales: str = ""


# Names of tensors without .weight or .bias, which both have, sources, or several of which the
# checkpoint has one.
Sources: TypeAlias = str | Source | tuple[str | Source, ...]


def first_half(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    return range(_halved(n))


def second_half(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    return range(_halved(n), n)


def every_first(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    """The first of every two."""
    return range(0, 2 * _halved(n), 2)


def every_second(n: int, sizes: Mapping[str, int]) -> Sequence[int]:
    """The second of every two."""
    return range(1, 2 * _halved(n), 2)


def _halved(n: int) -> int:
    if n % 2:
        raise ValueError(f"{n} are no two halves")
    return n // 2

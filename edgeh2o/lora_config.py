"""Low-rank adapters (LoRA) that a run adds to the weights of its model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import TypeGuard

from .errors import UsageError
from .option_fields import check_real, is_int

MOST_SCALE = 1000.0


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A folder of PEFT or a GGUF file, and by how much more than it says the adapter counts."""

    path: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        path = self.path
        if isinstance(path, os.PathLike):
            path = os.fspath(path)
        if not isinstance(path, str) or not path:
            raise UsageError(
                f"lora (--lora) must name the folder or file of an adapter, got {path!r:.80}"
            )
        object.__setattr__(self, "path", path)
        cure = "use 1 for what the adapter was trained with"
        values = f"from {-MOST_SCALE:g} to {MOST_SCALE:g}"
        check_real(self, "scale", values, lambda scale: abs(scale) <= MOST_SCALE, cure)


def read_adapters(text: str) -> tuple[LoraAdapter, ...]:
    """The adapters of ``PATH[:SCALE][,PATH[:SCALE]...]``, as a flag of the command line has them.

    What is there is meant, whatever is in its name. Raises UsageError.
    """
    texts = [text] if os.path.exists(text) else text.split(",")
    return tuple(_read_adapter(each) for each in texts)


def _read_adapter(text: str) -> LoraAdapter:
    path, colon, scale = text.rpartition(":")
    if colon and not os.path.exists(text):
        try:
            return LoraAdapter(path, float(scale))
        except ValueError:
            pass
    return LoraAdapter(text)


def join_adapters(parts: Iterable[tuple[LoraAdapter, ...]]) -> tuple[LoraAdapter, ...]:
    """Those of a flag that was given several times."""
    return tuple(chain(*parts))


def make_scales(lora: Mapping[int, float], n_adapters: int) -> tuple[float, ...]:
    """What each of so many adapters counts, by their numbers; those not named count nothing.

    Raises UsageError for a number that none has, and for a scale that cannot be.
    """
    if not isinstance(lora, Mapping):
        raise UsageError(f"lora of a prompt maps adapters to scales, {{0: 0.5}}, got {lora!r:.80}")
    unknown = [number for number in lora if not is_int(number) or not 0 <= number < n_adapters]
    if unknown:
        have = f"{n_adapters} loaded, from 0 on" if n_adapters else "none loaded (--lora)"
        raise UsageError(f"there is no adapter {unknown[0]!r:.80}; there are {have}")
    scales = {int(number): LoraAdapter("-", scale).scale for number, scale in lora.items()}
    return tuple(float(scales.get(number, 0.0)) for number in range(n_adapters))


LoraLike = str | os.PathLike[str] | tuple[str | os.PathLike[str], float] | LoraAdapter


def make_adapters(lora: LoraLike | Sequence[LoraLike] | None) -> tuple[LoraAdapter, ...]:
    """The adapters of a path, of a pair of path and scale, or of a list of such.

    Raises UsageError for anything else.
    """
    if lora is None:
        return ()
    if not isinstance(lora, (list, tuple)) or _is_pair(lora):
        lora = [lora]  # type: ignore[list-item]
    return tuple(_make_adapter(each) for each in lora)


def _is_pair(lora: object) -> TypeGuard[tuple[str, float]]:
    return isinstance(lora, tuple) and len(lora) == 2 and isinstance(lora[1], Real)


def _make_adapter(lora: object) -> LoraAdapter:
    if isinstance(lora, LoraAdapter):
        return lora
    if _is_pair(lora):
        return LoraAdapter(*lora)
    return LoraAdapter(lora)  # type: ignore[arg-type]

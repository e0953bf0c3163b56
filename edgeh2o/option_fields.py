"""Fields of the settings: their command line flags, and checks of their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any, TypeGuard

from .errors import UsageError

MAX_CONTEXT = 2**31 - 1


def option(
    default: Any,
    *flags: str,
    help: str,
    metavar: str | None = None,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    hash: bool | None = None,
) -> Any:
    """A dataclass field that is also a command line option named ``flags``.

    ``aliases`` are the names that users of llama.cpp know it by, ``hash`` is that of ``field``.
    """
    metadata = {
        "flags": flags,
        "help": help,
        "metavar": metavar,
        "choices": choices,
        "aliases": aliases,
    }
    return field(default=default, metadata=metadata, hash=hash)


def label(owner: Any, name: str) -> str:
    """How an error names a field: with its flag, if it has one."""
    for item in fields(owner):
        if item.name == name and item.metadata.get("flags"):
            return f"{name} ({item.metadata['flags'][-1]})"
    return name


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, whatever its type."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def require_flag(name: str, value: object) -> None:
    """Raises UsageError unless ``value`` is True or False: "no" would count as yes."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, got {value!r:.80}")


def check_flag(owner: Any, name: str) -> None:
    """Raises UsageError unless the field ``name`` is True or False."""
    require_flag(label(owner, name), getattr(owner, name))


def check_int(owner: Any, name: str, low: int, high: int = MAX_CONTEXT, cure: str = "") -> None:
    """Raises UsageError unless the field ``name`` is an integer from ``low`` to ``high``.

    It is one of Python's afterwards: those of NumPy are not JSON, as statistics and session files.
    """
    value = getattr(owner, name)
    if not is_int(value) or not low <= value <= high:
        hint = f"; {cure}" if cure else ""
        # A limit that nobody comes near is named to those who exceed it.
        is_open = high == MAX_CONTEXT and not (is_int(value) and value > high)
        allowed = f">= {low}" if is_open else f"from {low} to {high}"
        raise UsageError(f"{label(owner, name)} must be an integer {allowed}, got {value!r}{hint}")
    object.__setattr__(owner, name, int(value))


def check_real(
    owner: Any, name: str, allowed: str, is_allowed: Callable[[float], bool], cure: str
) -> None:
    """Raises UsageError unless the field ``name`` is a finite number that ``is_allowed``.

    It is one of Python's afterwards, as by ``check_int``.
    """
    value = getattr(owner, name)
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not math.isfinite(value) or not is_allowed(value):
        raise UsageError(f"{label(owner, name)} must be {allowed}, got {value!r}; {cure}")
    object.__setattr__(owner, name, int(value) if is_int(value) else float(value))

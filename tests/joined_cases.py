"""Many cases of a test in one: what pytest and its workers do for each would take longer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def for_each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Like ``pytest.mark.parametrize`` without ids; of a case that fails the message is led by it.

    Cases behind that one are not run, and fixtures are made once for all.
    """
    arguments = [name.strip() for name in names.split(",")]
    cases = [value if len(arguments) > 1 else (value,) for value in values]
    if not cases:
        raise ValueError(f"no cases of {names}")

    def join(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run_all(**others: Any) -> None:
            for case in cases:
                chosen = dict(zip(arguments, case, strict=True))
                try:
                    test(**others, **chosen)
                except pytest.skip.Exception:
                    raise AssertionError(f"{chosen} is skipped, and those behind it") from None
                except Exception as error:
                    raise AssertionError(f"with {chosen}: {error}") from error

        signature = inspect.signature(test)
        rest = [p for p in signature.parameters.values() if p.name not in arguments]
        run_all.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run_all

    return join

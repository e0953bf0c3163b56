"""Reads the fields of a request's body: every value is checked before it is used."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from .api_error import ApiError

MAX_DEPTH = 64
# Of a body: what is read takes up to thirty times the memory of its text otherwise ("[],[],[]").
MAX_VALUES = 2**18
_MAX_DIGITS = 1000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as JSON writes the half of a character


def parse_body(data: bytes) -> Fields:
    """The JSON object of a body.

    Raises ApiError for anything else, for one that is too deep or has too many values, and for
    half a character (a lone surrogate), which no answer could repeat.
    """
    value = _parse(data)
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, got {_kind(value)}")
    return Fields(value)


def parse_array(data: bytes, name: str) -> Fields:
    """The JSON array of a body, as the field ``name``. Raises as ``parse_body``."""
    value = _parse(data)
    if not isinstance(value, list):
        raise ApiError(f"the body must be a JSON array, got {_kind(value)}")
    return Fields({name: value})


def _parse(data: bytes) -> object:
    if _count_values(data) > MAX_VALUES:
        raise ApiError(f"the body has more than {MAX_VALUES} values", status=413)
    try:
        # Some clients put a mark of the byte order before the text.
        text = data.decode("utf-8-sig")
        value: object = json.loads(text, parse_constant=_refuse_constant, parse_int=_read_integer)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except _LongNumberError:
        raise ApiError(f"the body has a number of more than {_MAX_DIGITS} digits") from None
    except RecursionError:
        raise ApiError(f"the body is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    _check_depth(value)
    if _SURROGATE.search(data):
        _check_characters(value)
    return value


class Fields:
    """A JSON object whose values are taken by type; ``null`` counts as absent.

    Raises ApiError with the name of the field for a value of another type or out of range.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    @property
    def path(self) -> str:
        """The name of the object itself, "" for a whole body."""
        return self._path

    def raw(self, name: str) -> Any:
        """The value as it is, None if there is none."""
        return self._values.get(name)

    def without(self, name: str) -> Fields:
        """The others."""
        rest = {key: value for key, value in self._values.items() if key != name}
        return Fields(rest, self._path)

    def first(self, *names: str) -> str:
        """The first of several names of one field that has a value, else the last."""
        return next((name for name in names if self._values.get(name) is not None), names[-1])

    def label(self, name: str) -> str:
        """The name with the objects that it lies in."""
        return f"{self._path}.{name}" if self._path else name

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raises the error of a field."""
        value = self._values.get(name)
        shown = _kind(value) if isinstance(value, (dict, list, str)) else json.dumps(value)
        label = self.label(name)
        raise ApiError(f"'{label}' must be {expected}, got {shown:.100}", param=label)

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string."""
        value = self._values.get(name, default)
        if value is not None and not isinstance(value, str):
            self.refuse(name, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int | None:
        """A whole number; a float without a fraction counts."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(name, f"an integer from {least} to {most}")
        return int(value)

    def number(
        self, name: str, least: float, most: float, default: float | None = None
    ) -> float | None:
        """A finite number."""
        value = self._values.get(name)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or not math.isfinite(value):
            self.refuse(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def object(self, name: str) -> Fields | None:
        """A JSON object."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(value, self.label(name))

    def objects(self, name: str, most: int) -> list[Fields]:
        """An array of JSON objects, empty where there is none."""
        values = self._values.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(item, dict) for item in values):
            self.refuse(name, "an array of objects")
        if len(values) > most:
            raise ApiError(
                f"'{self.label(name)}' has {len(values)} entries, more than {most}",
                param=self.label(name),
            )
        return [Fields(item, f"{self.label(name)}[{i}]") for i, item in enumerate(values)]

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A string or an array of them, none of them empty."""
        value = self._values.get(name)
        values = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(values, Sequence) or not all(isinstance(v, str) and v for v in values):
            self.refuse(name, "a non-empty string or an array of such")
        if len(values) > most:
            self.refuse(name, f"at most {most} strings")
        return tuple(values)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A JSON object as it is, empty where there is none."""
        inner = self.object(name)
        return {} if inner is None else inner._values


def _count_values(data: bytes) -> int:
    """About as many values as JSON text has, without reading it: at least half of them."""
    if len(data) <= MAX_VALUES:
        return 0  # not too many at any rate
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote begins or ends a string
    n_strings = bare.count(b'"') // 2
    if n_strings > MAX_VALUES:
        return n_strings
    outside = b"".join(bare.split(b'"')[::2])
    return sum(outside.count(mark) for mark in (b",", b"[", b"{"))


class _LongNumberError(Exception):
    pass


def _read_integer(digits: str) -> int:
    """Python refuses those of some thousands of digits, in words for programmers."""
    if len(digits) > _MAX_DIGITS:
        raise _LongNumberError
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return
        level = inner
    raise ApiError(f"the body is nested more than {MAX_DEPTH} deep")


def _check_characters(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ApiError(f"the body has a lone surrogate, U+{code:04X}, in a string") from None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")

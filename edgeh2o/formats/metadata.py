"""Metadata of a model file: a read-only mapping with typed getters that explain what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

from .. import _core
from ..errors import FormatError

if TYPE_CHECKING:
    import numpy as np

MetadataValue: TypeAlias = Union[bool, int, float, str, tuple[str, ...], "np.ndarray[Any, Any]"]


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """An array as the file holds it, of the NumPy type ``dtype``.

    It becomes an array where it is asked for: a file is opened before NumPy is imported.
    """

    items: bytes
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredStrings:
    """``count`` strings as a GGUF file holds them: a length of 64 bits and UTF-8 each, checked.

    They become texts where they are asked for: the 98,000 of a vocabulary take 12 ms.
    """

    items: bytes
    count: int

    def texts(self) -> tuple[str, ...]:
        """The strings themselves."""
        return tuple(_core.read_strings(self.items, 0, self.count)[0])


StoredValue: TypeAlias = MetadataValue | StoredNumbers | StoredStrings

# A chat template of jinja2. Further ones have names, which a list holds too.
TEMPLATE_KEY = "tokenizer.chat_template"
TOOL_TEMPLATE_NAME = "tool_use"
TOOL_TEMPLATE_KEY = f"{TEMPLATE_KEY}.{TOOL_TEMPLATE_NAME}"
RANK_TEMPLATE_KEY = f"{TEMPLATE_KEY}.rerank"  # no jinja2: a text with {query} and {document}
TEMPLATE_NAMES_KEY = "tokenizer.chat_templates"

_T = TypeVar("_T")


def quote(text: str, limit: int = 80) -> str:
    """``text`` in quotes, printable and short: names come from files nobody vouches for."""
    return ascii(text if len(text) <= limit else text[: limit - 3] + "...")


def kind_of(value: MetadataValue) -> str:
    """What a value is, in the words of an error message."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a float"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, tuple):
        return f"an array of {len(value)} strings"
    return f"an array of {len(value)} {value.dtype.name} values"


class Metadata(Mapping[str, MetadataValue]):
    """Key-value pairs of a model file.

    Values are ``bool``, ``int``, ``float``, ``str``, ``tuple[str, ...]`` for an array of strings
    and a read-only one-dimensional ``np.ndarray`` for an array of numbers or booleans.

    The getters take the value if it is there and of the right kind, return ``default`` if the key
    is missing and ``default`` is not None, and raise ``FormatError`` otherwise.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, StoredValue]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> MetadataValue:
        value = self._values[key]
        if isinstance(value, StoredNumbers):
            import numpy as np

            value = self._values[key] = np.frombuffer(value.items, dtype=value.dtype)
        elif isinstance(value, StoredStrings):
            value = self._values[key] = value.texts()
        return value

    def stored(self, key: str) -> StoredValue | None:
        """The value as it is held at the moment: strings perhaps as in the file."""
        return self._values.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get_int(
        self,
        key: str,
        *,
        default: int | None = None,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> int:
        """An integer of any width, inside ``[minimum, maximum]`` where given."""
        value = self._take(key, default, int, "an integer")
        too_low = minimum is not None and value < minimum
        if too_low or (maximum is not None and value > maximum):
            raise FormatError(
                f"metadata key {quote(key)} is {value}, but must be "
                f"{_interval(minimum, maximum)}; the file is damaged or was converted wrongly"
            )
        return value

    def get_float(
        self,
        key: str,
        *,
        default: float | None = None,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> float:
        """A finite float strictly between ``above`` and ``below``."""
        value = self._take(key, default, float, "a float")
        if not above < value < below:  # also false for NaN
            bounds = f"above {above:g}" if math.isinf(below) else f"between {above:g} and {below:g}"
            limits = "finite" if math.isinf(above) and math.isinf(below) else f"finite and {bounds}"
            raise FormatError(
                f"metadata key {quote(key)} is {value:g}, but must be {limits}; "
                "the file is damaged or was converted wrongly"
            )
        return value

    def get_str(self, key: str, *, default: str | None = None) -> str:
        """A string."""
        return self._take(key, default, str, "a string")

    def get_bool(self, key: str, *, default: bool | None = None) -> bool:
        """A boolean; integers are not taken for one."""
        return self._take(key, default, bool, "a boolean")

    def get_strings(self, key: str, *, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """An array of strings."""
        return self._take(key, default, tuple, "an array of strings")

    def get_array(
        self,
        key: str,
        *,
        kinds: str = "iuf",
        length: int | None = None,
    ) -> np.ndarray[Any, Any]:
        """An array of numbers whose NumPy kind is in ``kinds``, of ``length`` items if given."""
        import numpy as np

        array = self._take(key, None, np.ndarray, "an array of numbers")
        if array.dtype.kind not in kinds:
            raise FormatError(
                f"metadata key {quote(key)} is {kind_of(array)}, which is the wrong type of number"
            )
        if length is not None and len(array) != length:
            raise FormatError(
                f"metadata key {quote(key)} has {len(array)} items, but must have {length}"
            )
        return array

    def _take(self, key: str, default: _T | None, wanted: type[_T], name: str) -> _T:
        value = self.get(key)
        if value is None:
            if default is None:
                raise FormatError(
                    f"metadata key {quote(key)} ({name}) is missing; "
                    "convert the model again with a current converter"
                )
            return default
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise FormatError(f"metadata key {quote(key)} is {kind_of(value)}, but must be {name}")
        return value


def _interval(minimum: int | None, maximum: int | None) -> str:
    if maximum is None:
        return f"at least {minimum}"
    if minimum is None:
        return f"at most {maximum}"
    return f"from {minimum} to {maximum}"

"""Typed access to the metadata keys of one architecture."""

from __future__ import annotations

from typing import Any

from ..errors import FormatError
from ..formats.metadata import Metadata, quote


class ArchitectureKeys:
    """Metadata read by the part of the key after the architecture's name.

    Getters raise ``FormatError`` that names the whole key and its range.
    """

    __slots__ = ("architecture", "metadata", "n_layers", "n_more")

    def __init__(
        self, metadata: Metadata, architecture: str, n_layers: int, n_more: int = 0
    ) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.n_layers = n_layers
        self.n_more = n_more  # layers behind these, of which arrays may have entries too

    def full(self, key: str) -> str:
        """The key as it stands in the file."""
        return f"{self.architecture}.{key}"

    def quoted(self, key: str) -> str:
        """The key as error messages name it."""
        return f"metadata key {quote(self.full(key))}"

    def has(self, key: str) -> bool:
        return self.full(key) in self.metadata

    def integers(
        self, key: str, *, maximum: int, default: int | None = None, minimum: int = 1
    ) -> tuple[int, ...]:
        """An integer per layer: of an array, or the same for all."""
        name = self.full(key)
        value = self.metadata.get(name, 0)
        lengths = self.n_layers, self.n_layers + self.n_more
        if isinstance(value, (int, float, str, tuple)) or len(value) not in lengths:
            entries = [self.metadata]
        else:
            entries = [Metadata({name: entry}) for entry in value.tolist()[: self.n_layers]]
        numbers = [
            entry.get_int(name, default=default, minimum=minimum, maximum=maximum)
            for entry in entries
        ]
        return tuple(numbers) if len(numbers) > 1 else (numbers[0],) * self.n_layers

    def integer(
        self, key: str, *, maximum: int, default: int | None = None, minimum: int = 1
    ) -> int:
        """An integer; an array of one per layer counts if all layers agree."""
        numbers = self.integers(key, maximum=maximum, default=default, minimum=minimum)
        if len(set(numbers)) > 1:
            raise FormatError(
                f"{self.quoted(key)} differs from layer to layer; "
                "only models whose layers are all alike in it are supported"
            )
        return numbers[0]

    def numbers(self, key: str) -> tuple[float, ...]:
        """A float per layer: of an array, or the same for all."""
        name = self.full(key)
        if isinstance(self.metadata.get(name, 0.0), (int, float, str)):
            return (self.metadata.get_float(name),) * self.n_layers
        return tuple(float(number) for number in self._entries(key, "f"))

    def flags(self, key: str) -> tuple[bool, ...]:
        """Of an array with an entry per layer, which some converters write as 0 and 1."""
        entries = self._entries(key, "biu")
        if any(entry not in (0, 1) for entry in entries):
            raise FormatError(
                f"{self.quoted(key)} must say yes or no of every layer; the file is damaged"
            )
        return tuple(map(bool, entries))

    def _entries(self, key: str, kinds: str) -> list[Any]:
        """Those of an array, which may have more for layers behind these."""
        array = self.metadata.get_array(self.full(key), kinds=kinds)
        if len(array) not in (self.n_layers, self.n_layers + self.n_more):
            self.metadata.get_array(self.full(key), length=self.n_layers, kinds=kinds)
        return list(array.tolist()[: self.n_layers])

    def number(
        self, key: str, *, above: float, below: float, default: float | None = None
    ) -> float:
        """A finite float strictly between ``above`` and ``below``."""
        return self.metadata.get_float(self.full(key), default=default, above=above, below=below)

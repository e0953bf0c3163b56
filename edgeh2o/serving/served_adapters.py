"""The adapters of a server (LoRA), and what each of them counts in a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import UsageError
from ..lora_config import LoraAdapter, make_scales
from .api_error import ApiError

_SUFFIXES = (".gguf", ".safetensors")


class AsksForModel(Protocol):
    """A request, by what it says of the model and of adapters."""

    @property
    def model(self) -> str: ...

    @property
    def lora(self) -> Mapping[int, float]: ...


class ServedAdapters:
    """What adapters count in requests that say nothing of it may change while they are served."""

    def __init__(self, adapters: Sequence[LoraAdapter]) -> None:
        self._paths = [adapter.path for adapter in adapters]
        self._scales = tuple(float(adapter.scale) for adapter in adapters)
        self._numbers: dict[str, int] = {}
        for number, path in enumerate(self._paths):
            self._numbers.setdefault(_name_of(path), number)

    @property
    def names(self) -> Sequence[str]:
        """By which a request may ask for one alone."""
        return list(self._numbers)

    def give_name(self, model: str) -> None:
        """Requests that say this name mean the model itself."""
        self._numbers.pop(model, None)

    def describe(self) -> list[dict[str, Any]]:
        """What ``GET /lora-adapters`` says."""
        pairs = zip(self._paths, self._scales, strict=True)
        return [{"id": i, "path": path, "scale": scale} for i, (path, scale) in enumerate(pairs)]

    def set_scales(self, given: Mapping[int, float]) -> None:
        """Of requests that say nothing, from now on; those that are not named count nothing.

        Raises ApiError for numbers that no adapter has; nothing changes then.
        """
        self._scales = self._all_scales(given)

    def name_of_answer(self, request: AsksForModel, model: str) -> str:
        """Of what answers it: the model, or an adapter that is asked for as for a model."""
        return request.model if self._is_named_by(request) else model

    def scales_of(self, request: AsksForModel) -> tuple[float, ...]:
        """What each counts in a request: as it says, by an adapter's name that alone, or as set.

        Raises ApiError for numbers that no adapter has.
        """
        if request.lora:
            return self._all_scales(request.lora)
        if self._is_named_by(request):
            return self._all_scales({self._numbers[request.model]: 1.0})
        return self._scales

    def _is_named_by(self, request: AsksForModel) -> bool:
        return not request.lora and request.model in self._numbers

    def _all_scales(self, given: Mapping[int, float]) -> tuple[float, ...]:
        try:
            return make_scales(given, len(self._paths))
        except UsageError as error:
            raise ApiError(str(error), param="lora") from None


def _name_of(path: str) -> str:
    """As the file or folder is called; of the tensors of a folder as that folder."""
    whole = Path(path)
    if whole.name == "adapter_model.safetensors" and whole.parent.name:
        return whole.parent.name
    return whole.stem if whole.suffix in _SUFFIXES else whole.name

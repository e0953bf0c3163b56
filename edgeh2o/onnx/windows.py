"""Sliding windows that only the configuration beside a graph names.

Exporters leave a window out of the graph and note it in ``genai_config.json`` (decoder,
``sliding_window``) or in ``config.json``: their runtimes then cut the cache. A graph that has
windows of its own, in attributes or masks, knows better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import FormatError

MAX_WINDOW = 2**31 - 1
# Architectures of transformers whose layers all have the window of their configuration.
_UNIFORM = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")
# Beginnings of those, as onnxruntime-genai spells them, of which each layer has it or has not: its
# builder writes an empty list where none has, and where it does not know of any.
_LISTED = ("cohere2", "exaone4", "gemma", "gptoss", "ministral", "olmo3", "qwen", "smollm3")


@dataclass(frozen=True, slots=True)
class ConfigWindow:
    """Positions that a query sees in the ``layers``; None: nobody says which, "all" all.

    ``place`` tells where that stands, for messages.
    """

    width: int
    layers: tuple[int, ...] | str | None
    place: str


def read_genai_window(
    decoder: Mapping[str, Any], architecture: str, name: str
) -> ConfigWindow | None:
    """The window of onnxruntime-genai's ``model.decoder``; of all layers unless it lists some.

    An empty list means all as well: the caches of all layers are then as large as the window
    (``DefaultKeyValueCache`` in its src/models/kv_cache.cpp). Raises FormatError for a width or
    layers that cannot be.
    """
    section: Any = decoder
    for key in ("cache", "kv_cache", "sliding_window"):  # where newer versions look first
        section = section.get(key) if isinstance(section, dict) else None
    if section is None:
        section = decoder.get("sliding_window")
    if section is None:
        return None
    place = f"{name} (sliding_window)"
    if isinstance(section, int):
        return ConfigWindow(_width(section, "sliding_window", name), "all", place)
    if not isinstance(section, dict):
        raise FormatError(f"{name}: sliding_window is {section!r:.40}, which is no section")
    if section.get("window_size") is None:
        return None
    width = _width(section["window_size"], "sliding_window.window_size", name)
    layers = section.get("layers")
    if layers is None:
        return ConfigWindow(width, "all", place)
    if not isinstance(layers, list) or not all(type(i) is int and i >= 0 for i in layers):
        raise FormatError(f"{name}: sliding_window.layers is {layers!r:.60}, not a list of layers")
    if not layers:
        return ConfigWindow(width, None if architecture.startswith(_LISTED) else "all", place)
    return ConfigWindow(width, tuple(layers), f"{name} (sliding_window.layers)")


def read_transformers_window(config: Mapping[str, Any], name: str) -> ConfigWindow | None:
    """The window of a ``config.json``. Raises FormatError for one that cannot be."""
    value = config.get("sliding_window")
    if value is None or config.get("use_sliding_window") is False:
        return None
    width = _width(value, "sliding_window", name)
    kinds = config.get("layer_types")
    if kinds is None:
        layers = "all" if config.get("model_type") in _UNIFORM else None
        return ConfigWindow(width, layers, f"{name} (sliding_window)")
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise FormatError(f"{name}: layer_types is {kinds!r:.60}, not a list of names")
    chosen = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return ConfigWindow(width, chosen, f"{name} (layer_types)")


def _width(value: object, key: str, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_WINDOW:
        raise FormatError(f"{name}: {key} is {value!r:.40}, which is no width of a window")
    return value

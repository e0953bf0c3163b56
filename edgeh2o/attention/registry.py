"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from ..errors import UsageError
from .base import SparseAttentionConfig, is_setting

Config = TypeVar("Config", bound=type[SparseAttentionConfig])

_ALGORITHMS: dict[str, type[SparseAttentionConfig]] = {}
# What every other module of this folder is: an algorithm, which its import registers.
_NOT_ALGORITHMS = {"base", "budget_table", "kept_profiles", "registry"}


def register_sparse_attention(name: str) -> Callable[[Config], Config]:
    """Class decorator that makes a configuration known as ``name``.

    Raises ValueError when another class has the name already.
    """

    def register(config: Config) -> Config:
        if _ALGORITHMS.setdefault(name, config) is not config:
            raise ValueError(f"two sparse attention algorithms are named {name!r}")
        config.algorithm = name
        return config

    return register


def sparse_attention_algorithms() -> dict[str, type[SparseAttentionConfig]]:
    """Configuration classes by name, those of the package first."""
    for module in iter_modules(import_module(str(__package__)).__path__):
        if module.name not in _NOT_ALGORITHMS:
            import_module(f".{module.name}", __package__)
    ours = f"{__package__}."
    order = sorted(_ALGORITHMS, key=lambda name: (ours not in _ALGORITHMS[name].__module__, name))
    return {name: _ALGORITHMS[name] for name in order}


def find_sparse_attention(name: str) -> type[SparseAttentionConfig]:
    """The configuration class of an algorithm. Raises UsageError that lists the known names."""
    algorithms = sparse_attention_algorithms()
    if name not in algorithms:
        known = ", ".join(sorted(algorithms))
        raise UsageError(f"sparse attention {name!r} is not known; use one of {known}")
    return algorithms[name]


def make_sparse_attention(
    settings: SparseAttentionConfig | Mapping[str, Any] | str | None,
) -> SparseAttentionConfig:
    """A configuration from plain values, such as a section of a file: ``algorithm`` and fields.

    A name is that algorithm's defaults, None the default algorithm's. Raises UsageError for an
    algorithm or a field that does not exist and for bad values.
    """
    if isinstance(settings, SparseAttentionConfig):
        return settings
    if settings is None or isinstance(settings, str):
        settings = {"algorithm": settings or "headwise"}
    if not isinstance(settings, Mapping):
        raise UsageError(
            "attention must be HeadwiseConfig(...) or another configuration, a name or a mapping, "
            f"got {settings!r:.80}"
        )
    values = dict(settings)
    name = values.pop("algorithm", None)
    if not isinstance(name, str):
        raise UsageError("sparse attention settings need an entry 'algorithm'")
    config = find_sparse_attention(name)
    known = {item.name for item in fields(config) if is_setting(item)}
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise UsageError(
            f"sparse attention {name!r} has no setting {unknown[0]!r}; "
            f"its settings are {', '.join(sorted(known)) or 'none'}"
        )
    return config(**{key: _as_tuple(value) for key, value in values.items()})


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

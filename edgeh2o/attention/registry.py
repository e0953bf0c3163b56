"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from ..errors import UsageError
from .base import SparseAttentionConfig

Config = TypeVar("Config", bound=type[SparseAttentionConfig])

_ALGORITHMS: dict[str, type[SparseAttentionConfig]] = {}
# Modules whose import registers the algorithms that ship with the package.
_BUILT_IN = ("dense", "h2o")


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
    for module in _BUILT_IN:
        import_module(f".{module}", __package__)
    return dict(_ALGORITHMS)


def find_sparse_attention(name: str) -> type[SparseAttentionConfig]:
    """The configuration class of an algorithm. Raises UsageError that lists the known names."""
    algorithms = sparse_attention_algorithms()
    if name not in algorithms:
        known = ", ".join(sorted(algorithms))
        raise UsageError(f"sparse attention {name!r} is not known; use one of {known}")
    return algorithms[name]

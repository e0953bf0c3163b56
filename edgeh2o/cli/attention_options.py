"""Flags that choose the attention of the prefill: the algorithm and its settings."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .options import add_config_options, flag_of, given_options
from .prompt import read_text

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig

DEFAULT_ALGORITHM = "headwise"
SECTION = "sparse_attention_config"
_MAX_CHARACTERS = 2**20


def add_attention_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--attention``, ``--attention-config`` and the flags of every algorithm."""
    from ..attention.registry import sparse_attention_algorithms

    algorithms = sparse_attention_algorithms()
    group = parser.add_argument_group("sparse attention")
    group.add_argument(
        "--attention",
        choices=sorted(algorithms),
        help="what a chunk of the prompt reads of its past (default: the algorithm whose flags "
        f"are given, else {DEFAULT_ALGORITHM})",
    )
    group.add_argument(
        "--attention-config",
        metavar="FILE",
        help=f"YAML file with a section {SECTION}: the algorithm and its settings",
    )
    for name, config in algorithms.items():
        add_config_options(parser, config, title=f"sparse attention: {name}", prefix=name)


def read_attention(args: argparse.Namespace) -> SparseAttentionConfig:
    """The attention that the flags describe; dense for a verb that has none.

    Flags win over the file. ``--h2o-local 0 --h2o-heavy 0`` is dense attention. Raises UsageError
    for flags of an algorithm that is not the one chosen, and for values out of range.
    """
    from ..attention.dense import DenseConfig
    from ..attention.h2o import H2OConfig
    from ..attention.registry import make_sparse_attention, sparse_attention_algorithms

    if "attention" not in args:
        return DenseConfig()
    algorithms = sparse_attention_algorithms()
    given = {
        name: settings
        for name, config in algorithms.items()
        if (settings := given_options(args, config, prefix=name))
    }
    from_file = _read_file(args.attention_config) if args.attention_config else {}
    chosen = args.attention or from_file.get("algorithm") or next(iter(given), DEFAULT_ALGORITHM)
    for name, settings in given.items():
        if name != chosen:
            flag = flag_of(algorithms[name], next(iter(settings)), prefix=name)
            raise UsageError(f"{flag} is a setting of {name}, and the attention is {chosen}")
    settings = {"algorithm": chosen}
    if from_file.get("algorithm") == chosen:
        settings |= from_file
    elif from_file:
        warnings.warn(
            f"--attention {chosen} takes the place of the settings of {from_file['algorithm']} in "
            f"{args.attention_config}",
            stacklevel=1,
        )
    attention = make_sparse_attention(settings | given.get(str(chosen), {}))
    if isinstance(attention, H2OConfig) and attention.local + attention.heavy == 0:
        return DenseConfig()
    return attention


def _read_file(path: str) -> dict[str, Any]:
    import yaml

    text = read_text(path, flag="--attention-config")
    if len(text) > _MAX_CHARACTERS:
        raise UsageError(f"{path} is too large for a file of settings (--attention-config)")
    try:
        content = yaml.safe_load(text)
    # The reader of a value that its tag does not fit, such as !!int "", raises what it happens to.
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is not YAML (--attention-config): {reason}") from None
    section = content.get(SECTION) if isinstance(content, dict) else None
    if not isinstance(section, dict) or not isinstance(section.get("algorithm"), str):
        raise UsageError(f"{path} has no section {SECTION} with an entry 'algorithm'")
    return {str(key): value for key, value in section.items()}

"""Environment variables that begin with EDGEH2O_: those beside the flags', and what was misspelt.

Flags have theirs by a rule (``edgeh2o/cli/parser.py``). A variable that nothing reads would be
ignored silently: a misspelt one is a setting that somebody relies on.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterable

from .parser import PREFIX, environment_variable, takes_value

# What users set that is no flag, and what it does; docs/usage.md has it from here.
VARIABLES = {
    "EDGEH2O_CACHE": "folder of fetched models, of packed weights, and of the tables and profiles "
    "of models (default: `edgeh2o` in `$XDG_CACHE_HOME`, else `~/.cache/edgeh2o`)",
    "EDGEH2O_ISA": "as `--isa`, for Python too",
    "EDGEH2O_DEVICE": "as `--device`, for Python too",
    "EDGEH2O_LIBCUDA": "the library of NVIDIA's driver (default: `libcuda.so.1`)",
    "EDGEH2O_CUDA_IMAGES": "folder of compiled kernels for GPUs (default: those of the package)",
}
# Of builds, tests and tools (CONTRIBUTING.md, docs/devices.md).
OTHER_VARIABLES = frozenset(
    (
        "EDGEH2O_CI_WHEEL",
        "EDGEH2O_CUDA",
        "EDGEH2O_DEBUG",
        "EDGEH2O_HOST_DEVICE_FAIL",
        "EDGEH2O_HOST_DEVICE_LOG",
        "EDGEH2O_HOST_DEVICE_MEMORY",
        "EDGEH2O_HOST_DEVICE_SEED",
        "EDGEH2O_HOST_DEVICE_SKIP",
        "EDGEH2O_ISAS",
        "EDGEH2O_NVRTC",
        "EDGEH2O_OBJECTS",
        "EDGEH2O_SANITIZE",
        "EDGEH2O_TEST_STEP",
        "EDGEH2O_VOCABS",
    )
)


def variables_of(parser: argparse.ArgumentParser) -> set[str]:
    """Those of the flags of a command, or of all commands that ``parser`` has."""
    found = {environment_variable(a) for a in parser._actions if takes_value(a)}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(variables_of, action.choices.values()))
    return found


def warn_of_unknown(
    parser: argparse.ArgumentParser, build_whole: Callable[[], argparse.ArgumentParser]
) -> None:
    """One warning of the variables that are set and that no command reads.

    ``build_whole`` makes the parser of all commands, which takes a while: it is called only where
    one is set that ``parser`` does not know.
    """
    names = {name for name in os.environ if name.startswith(PREFIX)}
    names -= VARIABLES.keys() | OTHER_VARIABLES
    if not names or not (names := names - variables_of(parser)):
        return
    known = variables_of(build_whole())
    if not (unknown := sorted(names - known)):
        return
    shown = ", ".join(f"{name}{_hint(name, known)}" for name in unknown)
    is_one = len(unknown) == 1
    warnings.warn(
        f"{'this variable is' if is_one else 'these variables are'} not known, and ignored: "
        f"{shown}; {'it stands' if is_one else 'they stand'} for no flag of any command",
        stacklevel=2,
    )


def _hint(name: str, flags: Iterable[str]) -> str:
    """The variable that was meant, perhaps: flags of other programs have other names."""
    from .suggestions import suggest_flag

    known = {_as_flag(each): each for each in (*flags, *VARIABLES)}
    similar = suggest_flag(_as_flag(name), known)
    return f" (did you mean {known[similar]}?)" if similar else ""


def _as_flag(name: str) -> str:
    return "--" + name.removeprefix(PREFIX).replace("_", "-").lower()

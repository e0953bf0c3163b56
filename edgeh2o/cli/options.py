"""Turns the fields of a configuration dataclass into flags, and parsed flags back into one.

A field's flags and help come from its metadata (see ``option_fields.option``). A field without
flags gets ``--<prefix>-<name>`` when a prefix is given, as the sparse attention configurations do.
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from ..errors import UsageError
from ..lora_config import LoraAdapter, join_adapters, read_adapters
from ..sampler_names import describe_unknown, read_samplers

Config = TypeVar("Config")


def utf8_text(argument: str) -> str:
    """An argparse type: text in UTF-8, whatever the locale, which Python decodes arguments by."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(
            f"not valid UTF-8 at byte {getattr(error, 'start', 0)}; write it in UTF-8"
        ) from None


def _read_samplers(text: str) -> tuple[str, ...]:
    """An argparse type: names with semicolons between. Warns of others, as llama.cpp does."""
    known, unknown = read_samplers([name.strip() for name in text.split(";") if name.strip()])
    if unknown:
        warnings.warn(f"--samplers: {describe_unknown(unknown)}", stacklevel=2)
    return known


_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "N"),
    "int | None": (int, "N"),
    "float": (float, "X"),
    "float | None": (float, "X"),
    "str": (str, "NAME"),
    "str | int": (str, "NAME"),
    "str | None": (str, "NAME"),
    "Sequence[str] | str": (_read_samplers, "NAMES"),
}


def _read_bias(text: str) -> tuple[int, float]:
    """An argparse type: a token id, a sign, a number, as llama.cpp has it."""
    match = re.fullmatch(r"([0-9]+)([+-][0-9.]+)", text, re.ASCII)
    try:
        if match is not None:
            return int(match[1]), float(match[2])
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r:.80} is not a token id with what is added to it, such as 15043+1 or 15043-100"
    )


def _read_adapters(text: str) -> tuple[LoraAdapter, ...]:
    """An argparse type: ``PATH[:SCALE]``, or several after commas."""
    try:
        return read_adapters(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Flags that may be given several times: how each is read, and what they make together.
_LISTS: dict[str, tuple[Callable[[str], Any], Callable[[list[Any]], Any]]] = {
    "Sequence[str]": (utf8_text, tuple),
    "Mapping[int, float] | None": (_read_bias, dict),
    "Sequence[LoraAdapter]": (_read_adapters, join_adapters),
}


def add_config_options(
    parser: argparse.ArgumentParser,
    config: type[Any],
    *,
    title: str,
    prefix: str = "",
    skip: Collection[str] = (),
    helps: Mapping[str, str] | None = None,
) -> None:
    """Adds a group of flags for the fields of ``config`` but those in ``skip``.

    ``helps`` says of fields by name what they do, where that differs from what they say.
    """
    group = parser.add_argument_group(title)
    for item, flags in _flagged_fields(config, prefix):
        if item.name in skip:
            continue
        settings: dict[str, Any] = {
            "dest": _destination(item, prefix),
            "default": None,  # told apart from a flag that was given
            "help": _help_text(item, (helps or {}).get(item.name)),
        }
        if item.type == "bool":
            settings["action"] = "store_true"
        elif item.type in _LISTS:
            settings |= {"action": "append", "metavar": item.metadata.get("metavar")}
            settings["type"] = _LISTS[item.type][0]
        else:
            parse, metavar = _PARSERS[str(item.type)]
            settings |= {"type": parse, "metavar": item.metadata.get("metavar") or metavar}
            if choices := item.metadata.get("choices"):
                settings |= {"choices": choices, "metavar": None}
        group.add_argument(*flags, *item.metadata.get("aliases", ()), **settings)


def read_config(args: argparse.Namespace, config: type[Config], *, prefix: str = "") -> Config:
    """Makes ``config`` from parsed flags; a field without a flag gets its default.

    Raises UsageError for a value out of range.
    """
    return config(**given_options(args, config, prefix=prefix))


def given_options(
    args: argparse.Namespace, config: type[Any], *, prefix: str = ""
) -> dict[str, Any]:
    """The fields of ``config`` whose flags were given, with their values."""
    values = {}
    for item, _ in _flagged_fields(config, prefix):
        value = getattr(args, _destination(item, prefix), None)
        if value is not None:
            join = _LISTS[str(item.type)][1] if isinstance(value, list) else None
            values[item.name] = join(value) if join else value
    return values


def flag_of(config: type[Any], name: str, *, prefix: str = "") -> str:
    """The flag of the field ``name``, in its long form."""
    return next(flags[-1] for item, flags in _flagged_fields(config, prefix) if item.name == name)


def parse_value(type_name: str, text: str) -> Any:
    """A value of a field of this type. Raises ValueError for any other text."""
    if type_name == "bool":
        if text not in ("true", "false"):
            raise ValueError(f"{text!r} is neither true nor false")
        return text == "true"
    if type_name not in _PARSERS:
        raise ValueError(f"a {type_name} cannot be given as one word")
    parse, _ = _PARSERS[type_name]
    return parse(text)


def _flagged_fields(config: type[Any], prefix: str) -> Iterator[tuple[Field[Any], list[str]]]:
    for item in fields(config):
        if not item.metadata.get("is_option", True):
            continue
        flags = list(item.metadata.get("flags", ()))
        if prefix and not flags:
            flags = [f"--{prefix}-{item.name.replace('_', '-')}"]
        if flags:
            yield item, flags


def _destination(item: Field[Any], prefix: str) -> str:
    return f"{prefix}_{item.name}" if prefix else item.name


def _help_text(item: Field[Any], text: str | None = None) -> str:
    text = text or str(item.metadata.get("help", item.name.replace("_", " ")))
    text = text.replace("%", "%%")
    is_said = item.default is MISSING or isinstance(item.default, tuple)  # by the help itself
    has_default = not is_said and item.default is not None and item.type != "bool"
    return f"{text} (default: {item.default})" if has_default else text

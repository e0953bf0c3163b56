"""The JSON files that lie beside the weights of a model: settings, tokenizer, chat template."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from ..errors import FormatError, ResourceError
from .metadata import TOOL_TEMPLATE_NAME

MAX_JSON_BYTES = 16 * 2**20
TEMPLATE_FILE, OLDER_TEMPLATE_FILE = "chat_template.jinja", "chat_template.json"
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT
TEMPLATE_FOLDER = "additional_chat_templates"
MAX_TOKENIZER_BYTES = 128 * 2**20


def read_tokenizer_files(root: Path) -> dict[str, Any]:
    """``tokenizer_json``, two templates, ``bos`` and ``eos`` of a folder; None what is missing.

    The templates, ``chat_template`` and ``tool_template`` (for requests with tools), are unchecked.
    Raises FormatError for a file that is malformed, ResourceError for one that cannot be read.
    """
    path = root / "tokenizer.json"
    settings = read_json_if_there(root / "tokenizer_config.json")
    return {
        "tokenizer_json": _read_text(path, MAX_TOKENIZER_BYTES) if path.is_file() else None,
        "chat_template": _read_template(root, settings, "default"),
        "tool_template": _read_template(root, settings, TOOL_TEMPLATE_NAME),
        "bos": _token_text(settings.get("bos_token")),
        "eos": _token_text(settings.get("eos_token")),
    }


def _read_template(root: Path, settings: dict[str, Any], name: str) -> object:
    """The template of this name, of the files that transformers looks at, in its order.

    The older file is that of models of images.
    """
    named, unnamed = root / TEMPLATE_FOLDER / f"{name}.jinja", root / TEMPLATE_FILE
    is_default = name == "default"
    if named.is_file():
        return _read_text(named, MAX_JSON_BYTES)
    if unnamed.is_file():  # then a list in the settings is an older one
        return _read_text(unnamed, MAX_JSON_BYTES) if is_default else None
    template = settings.get("chat_template")
    if isinstance(template, list):
        items = (item for item in template if isinstance(item, dict))
        return next((item.get("template") for item in items if item.get("name") == name), None)
    if not is_default:
        return None
    if template is None:
        template = read_json_if_there(root / OLDER_TEMPLATE_FILE).get("chat_template")
    return template


def read_model_settings(root: Path) -> dict[str, Any]:
    """What ``read_tokenizer_files`` gives, and ``more_eos``: ids of config.json and its like.

    Where the tokenizer's settings name no ``bos`` and ``eos``, the first ids are these.
    """
    files = read_tokenizer_files(root)
    config, generation = root / "config.json", root / "generation_config.json"
    bos, eos = (_token_ids_of(config, f"{name}_token_id") for name in ("bos", "eos"))
    eos += _token_ids_of(generation, "eos_token_id")
    files["bos"] = files["bos"] or next(iter(bos), None)
    files["eos"] = files["eos"] or next(iter(eos), None)
    return {**files, "more_eos": eos}


def _token_ids_of(path: Path, key: str) -> tuple[int, ...]:
    return read_token_ids(read_json_if_there(path).get(key), f"{path}: {key}")


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FormatError for anything else."""
    text = _read_text(path, MAX_JSON_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not valid JSON: {error}; fetch it again") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds no JSON object; fetch it again")
    return value


def _read_text(path: Path, limit: int) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
                raise FormatError(f"{path} has {info.st_size} bytes, more than {limit}")
            return file.read(limit).decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not UTF-8 text; fetch it again") from None
    except FileNotFoundError:
        raise ResourceError(f"{path} is missing; fetch that file too") from None
    except OSError as error:
        raise ResourceError(f"{path} cannot be read: {error.strerror}") from None


def read_token_ids(value: object, key: str) -> tuple[int, ...]:
    """A token id, a list of them, or nothing. Raises FormatError that names ``key``."""
    values: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in values):
        raise FormatError(f"{key} is {value!r:.60}, not a token id or a list of them")
    return tuple(item for item in values if item >= 0)


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None

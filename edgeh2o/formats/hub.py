"""Fetches models from the Hugging Face Hub, or a mirror of it, by the library huggingface_hub.

Its cache keeps the files, shared with other programs; an interrupted download goes on where it
stopped. What was fetched must have the checksum that the hub's list of files gives. Code and
pickles of a repository are never fetched.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FormatError, ResourceError, UsageError
from .metadata import quote
from .safetensors import INDEX_NAME, SUFFIX

ENDPOINT_VARIABLE = "HF_ENDPOINT"
DEFAULT_ENDPOINT = "https://huggingface.co"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>.+))?", re.ASCII)
_PART = re.compile(r"-[0-9]{5}-of-(?P<count>[0-9]{5})\.gguf$")
# Beside the weights of a folder of safetensors.
_SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", INDEX_NAME,
)  # fmt: skip
_READ_BYTES = 2**20
_MAX_NAMES_SHOWN = 12

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository: its size, and its SHA-256 or the SHA-1 that git gives it."""

    name: str
    n_bytes: int
    sha256: str | None
    git_sha1: str | None


def is_hub_name(name: str) -> bool:
    """Whether a name has the form ``org/name`` or ``org/name:file``."""
    return _NAME.fullmatch(name) is not None


def pull_from_hub(name: str, *, on_message: Tell | None = None) -> Path:
    """Fetches ``org/name`` or ``org/name:file``; returns the path of the GGUF file or the folder.

    ``file`` is the name of a GGUF file, or a part of it that no other has, such as ``Q4_K_M``; it
    may be left out where there is one, or none and the model is one of safetensors. Parts of a
    split file come along. Raises UsageError for a name that leaves open what is meant or without
    the library, FormatError for a file of another checksum, ResourceError for what cannot be
    fetched or stored.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{quote(name)} is not of the form org/name or org/name:file")
    hub = _import_hub()
    endpoint = os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
    tell = on_message or (lambda _: None)
    try:
        api = hub.HfApi(endpoint=endpoint)
        info = api.model_info(match["repo"], files_metadata=True)
        files = _choose_files(match["repo"], match["file"], _list_files(info))
        _require_space(hub, files)
        paths = []
        for file in files:
            tell(f"fetching {match['repo']}/{file.name} ({file.n_bytes / 1e6:.0f} MB)")
            path = hub.hf_hub_download(
                match["repo"], file.name, revision=info.sha, endpoint=endpoint
            )
            paths.append(Path(path))
            _check(paths[-1], file)
    except (FormatError, UsageError, ResourceError):
        raise
    except Exception as error:  # the classes of its HTTP client change from version to version
        raise _explain(hub, error, match["repo"], endpoint) from None
    return paths[0] if files[0].name.endswith(".gguf") else paths[0].parent


def _import_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(
            "models of the Hugging Face Hub need a library: pip install 'edgeh2o[pull]'; or fetch "
            "the file yourself and give its path"
        ) from None
    return huggingface_hub


def _list_files(info: Any) -> list[HubFile]:
    files = []
    for item in info.siblings or []:
        lfs = getattr(item, "lfs", None)
        sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
        size = item.size or 0
        files.append(HubFile(item.rfilename, size, sha256, getattr(item, "blob_id", None)))
    return files


def _choose_files(repo: str, wanted: str | None, files: Sequence[HubFile]) -> list[HubFile]:
    models = [file for file in files if file.name.endswith(".gguf")]
    if wanted is not None:
        exact = [file for file in models if file.name == wanted]
        models = exact or [file for file in models if _has_word(file.name, wanted)]
    elif not models:
        return _choose_folder(repo, files)
    sets = {_PART.sub("", file.name) for file in models}
    if len(sets) != 1:
        names = [file.name for file in files if file.name.endswith(".gguf")]
        shown = ", ".join(map(quote, names[:_MAX_NAMES_SHOWN]))
        more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
        what = f"several files match {quote(wanted)}" if sets and wanted else "name the file"
        if wanted and not sets:
            what = f"no GGUF file is called {quote(wanted)}"
        raise UsageError(f"{repo}: {what}, as in {repo}:Q4_K_M; it has {shown or 'none'}{more}")
    models.sort(key=lambda file: file.name)
    part = _PART.search(models[0].name)
    if part is not None and int(part["count"]) != len(models):
        raise ResourceError(
            f"{repo} has {len(models)} of {int(part['count'])} parts of {quote(models[0].name)}"
        )
    return models


def _choose_folder(repo: str, files: Sequence[HubFile]) -> list[HubFile]:
    names = {file.name for file in files}
    weights = [f for f in files if f.name.endswith(SUFFIX) and "/" not in f.name]
    if any(f.name.startswith("model") for f in weights):  # not a second copy in another layout
        weights = [f for f in weights if f.name.startswith("model")]
    if not weights or "config.json" not in names:
        raise ResourceError(
            f"{repo} has neither a GGUF file nor safetensors with a config.json; choose another "
            "repository of the model"
        )
    return [file for file in files if file.name in _SETTINGS] + weights


def _has_word(name: str, word: str) -> bool:
    """Whether ``word`` is in the name, with neither letter, digit nor underscore beside it."""
    return (
        re.search(rf"(?<![a-z0-9_]){re.escape(word.lower())}(?![a-z0-9_])", name.lower())
        is not None
    )


def _require_space(hub: Any, files: Sequence[HubFile]) -> None:
    folder = Path(hub.constants.HF_HUB_CACHE)
    there = next(each for each in (folder, *folder.parents) if each.exists())
    needed, free = sum(file.n_bytes for file in files), shutil.disk_usage(there).free
    if free < needed:
        raise ResourceError(
            f"the model takes {needed / 1e6:.0f} MB and {folder} has {free / 1e6:.0f} MB free; "
            "free some space, or set HF_HOME to another folder"
        )


def _check(path: Path, file: HubFile) -> None:
    """Compares the checksum; removes a file that has another one."""
    if file.sha256 is not None:
        digest, expected = hashlib.sha256(), file.sha256
    elif file.git_sha1 is not None:
        digest, expected = hashlib.sha1(usedforsecurity=False), file.git_sha1
        digest.update(b"blob %d\0" % path.stat().st_size)
    else:
        raise FormatError(
            f"the hub gives no checksum of {quote(file.name)}; nothing can be checked"
        )
    with path.open("rb") as source:
        while block := source.read(_READ_BYTES):
            digest.update(block)
    if digest.hexdigest() != expected:
        blob = path.resolve()
        path.unlink()
        blob.unlink(missing_ok=True)
        raise FormatError(
            f"{quote(file.name)} has the checksum {digest.hexdigest()}, not {expected}; "
            "it was altered or damaged on the way and is not used: try again, or another mirror"
        )


def _explain(hub: Any, error: Exception, repo: str, endpoint: str) -> ResourceError:
    errors = hub.errors
    if isinstance(error, errors.GatedRepoError):
        cure = "accept its licence on the hub's page and set HF_TOKEN"
        return ResourceError(f"{repo} is open to those who accepted its licence only; {cure}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ResourceError(
            f"{repo} is not on {endpoint}, or is private; check the name, or set HF_TOKEN"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return ResourceError(f"{endpoint} answered {status} for {repo}; try again later")
    is_of_disk = isinstance(error, OSError) and error.errno is not None and bool(error.filename)
    if is_of_disk:
        return ResourceError(
            f"{repo} cannot be stored: {error}; free some space, or set HF_HOME to another folder"
        )
    detail = " ".join(str(error).split())[:200] or type(error).__name__
    return ResourceError(
        f"{repo} cannot be fetched from {endpoint}: {detail}; check the network, or set "
        f"{ENDPOINT_VARIABLE} to a mirror. What was fetched so far is kept"
    )

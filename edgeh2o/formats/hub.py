"""Fetches models from the Hugging Face Hub, or a mirror of it, by the library huggingface_hub.

Its cache keeps the files, shared with other programs; an interrupted download goes on where it
stopped. What was fetched must have the checksum that the hub's list of files gives. Code and
pickles of a repository are never fetched. A server that says nothing is waited for as long as the
library's variables HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT say.
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
from urllib.parse import unquote, urlsplit

from ..errors import FormatError, ResourceError, UsageError, is_shortage
from .metadata import quote
from .part_names import PART_NAME, name_of_whole
from .safetensors import INDEX_NAME, SUFFIX

ENDPOINT_VARIABLE = "HF_ENDPOINT"
DEFAULT_ENDPOINT = "https://huggingface.co"
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# As the hub has them: no part begins with a dot, as those of paths do.
_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<file>.+))?", re.ASCII)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHER_KINDS = ("datasets/", "spaces/")
# What may follow org/name in an address; a file after blob and resolve.
_PAGES = re.compile(r"(?:/(?:tree/main|(?:blob|resolve)/main/(?P<file>.+)))?/?")
# Beside the weights of a folder of safetensors.
_SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "chat_template.json", INDEX_NAME,
    "additional_chat_templates/default.jinja", "additional_chat_templates/tool_use.jinja",
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


def read_hub_name(text: str) -> str | None:
    """``org/name`` or ``org/name:file`` of such a name or of an address of the hub; None of others.

    Addresses are those of huggingface.co, hf.co and the host of HF_ENDPOINT, with or without
    ``https://``. Raises UsageError for an address of another host, or of something else than a
    model's newest state.
    """
    has_scheme = text.lower().startswith(("https://", "http://"))
    mirror = urlsplit(_endpoint())
    try:
        url = urlsplit(text if has_scheme else f"https://{text}")
        place = (url.hostname, url.port)
    except ValueError:  # perhaps the port, which is a file then
        url, place = urlsplit(""), (None, None)
    path = unquote(url.path)
    is_mirror = place == (mirror.hostname, mirror.port) and (has_scheme or "/" in path.strip("/"))
    if not is_mirror and place[0] not in _HOSTS:
        if has_scheme:
            raise _wrong_address(text)
        return text if _NAME.fullmatch(text) else None
    if is_mirror:
        path = path.removeprefix(mirror.path)
    path = path.strip("/")
    if path.startswith(_OTHER_KINDS):
        raise _wrong_address(text)
    if _NAME.fullmatch(path):
        return path
    repo = "/".join(path.split("/")[:2])
    page = _PAGES.fullmatch(path[len(repo) :])
    if page is None or _NAME.fullmatch(repo) is None:
        raise _wrong_address(text)
    return f"{repo}:{page['file']}" if page["file"] else repo


def _wrong_address(text: str) -> UsageError:
    return UsageError(
        f"{quote(text)} is not the address of a model of the Hugging Face Hub; use org/name or "
        f"org/name:file, and {ENDPOINT_VARIABLE} for a mirror"
    )


def _endpoint() -> str:
    """Raises UsageError for a variable that holds no address."""
    endpoint = (os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT).rstrip("/")
    try:
        url = urlsplit(endpoint)
        is_good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise UsageError(
            f"{ENDPOINT_VARIABLE}={quote(endpoint)} is not the address of a hub, such as "
            f"{DEFAULT_ENDPOINT}; correct or unset it"
        )
    return endpoint


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
    _require_online(hub)
    endpoint = _endpoint()
    tell = on_message or (lambda _: None)
    try:
        api = hub.HfApi(endpoint=endpoint)
        timeout_s = hub.constants.HF_HUB_ETAG_TIMEOUT
        info = api.model_info(match["repo"], files_metadata=True, timeout=timeout_s)
        files = _choose_files(match["repo"], match["file"], _list_files(info))
        _require_space(hub, files)
        paths = []
        for file in files:
            tell(f"fetching {match['repo']}/{file.name} ({file.n_bytes / 1e6:.0f} MB)")
            paths.append(_fetch(hub, match["repo"], file.name, info.sha, endpoint))
            _check(paths[-1], file)
    except (FormatError, UsageError, ResourceError):
        raise
    except Exception as error:  # the classes of its HTTP client change from version to version
        if is_shortage(error):
            raise
        raise _explain(hub, error, match["repo"], endpoint) from None
    # The last file lies in the folder itself; a setting may be in one inside.
    return paths[0] if files[0].name.endswith(".gguf") else paths[-1].parent


def find_in_hub_cache(name: str) -> Path | None:
    """The GGUF file of ``org/name:file`` that was fetched before, the latest of several.

    None without ``file``: what else the repository has decides then. Raises as ``pull_from_hub``
    does without the library.
    """
    repo, _, wanted = name.partition(":")
    if not wanted:
        return None
    cache = Path(_import_hub().constants.HF_HUB_CACHE)
    states = (cache / f"models--{repo.replace('/', '--')}" / "snapshots").glob("*")
    for state in sorted(states, key=lambda path: path.stat().st_mtime, reverse=True):
        there = [path.relative_to(state).as_posix() for path in state.rglob("*.gguf")]
        try:
            chosen = _choose_files(repo, wanted, [HubFile(name, 0, None, None) for name in there])
        except (UsageError, ResourceError):
            continue
        return state / chosen[0].name
    return None


def _import_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants  # it reads the variables
    except ImportError as error:
        if is_shortage(error):
            raise
        raise UsageError(
            "models of the Hugging Face Hub need a library: pip install 'edgeh2o[pull]'; or fetch "
            "the file yourself and give its path"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"huggingface_hub cannot read one of its variables HF_...: {error}; correct or unset it"
        ) from None
    return huggingface_hub


def _require_online(hub: Any) -> None:
    if hub.constants.HF_HUB_OFFLINE:
        names = [name for name in _OFFLINE_VARIABLES if os.environ.get(name)]
        raise UsageError(
            f"{names[0] if names else _OFFLINE_VARIABLES[0]} forbids to fetch anything; unset it, "
            "or give the path of a model that is there"
        )


def _fetch(hub: Any, repo: str, name: str, revision: str, endpoint: str) -> Path:
    """One file, in the cache of the library. Raises what the library raises."""
    if not isinstance(hub.try_to_load_from_cache(repo, name, revision=revision), str):
        # The library itself asks again and again for minutes where nothing is answered.
        url = hub.hf_hub_url(repo, name, revision=revision, endpoint=endpoint)
        hub.get_hf_file_metadata(url, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT)
    return Path(hub.hf_hub_download(repo, name, revision=revision, endpoint=endpoint))


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
    sets = {name_of_whole(file.name) for file in models}
    if len(sets) != 1:
        names = [file.name for file in files if file.name.endswith(".gguf")]
        shown = ", ".join(map(quote, names[:_MAX_NAMES_SHOWN]))
        more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
        what = f"several files match {quote(wanted)}" if sets and wanted else "name the file"
        if wanted and not sets:
            what = f"no GGUF file is called {quote(wanted)}"
        raise UsageError(f"{repo}: {what}, as in {repo}:Q4_K_M; it has {shown or 'none'}{more}")
    models.sort(key=lambda file: file.name)
    part = PART_NAME.fullmatch(models[0].name)
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
    if _is_timeout(error):
        settings = hub.constants
        return ResourceError(
            f"{endpoint} does not answer for {repo}; check the network, set {ENDPOINT_VARIABLE} to "
            f"another mirror, or wait longer: HF_HUB_ETAG_TIMEOUT is "
            f"{settings.HF_HUB_ETAG_TIMEOUT} s, HF_HUB_DOWNLOAD_TIMEOUT "
            f"{settings.HF_HUB_DOWNLOAD_TIMEOUT} s. What was fetched so far is kept"
        )
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


def _is_timeout(error: BaseException | None) -> bool:
    """Whether the HTTP client gave up waiting; every one of them has classes called so."""
    while error is not None:
        if any("Timeout" in kind.__name__ for kind in type(error).__mro__):
            return True
        error = error.__cause__
    return False

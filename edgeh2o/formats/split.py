"""Models split over several GGUF files: ``model-00001-of-00003.gguf`` and so on.

The names of the other files come from the name of the given one and a count that both the name and
the metadata state; nothing of a path is ever taken from inside a file.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from ..errors import FormatError, ResourceError
from .gguf import GgufFile, open_gguf
from .gguf_header import MAX_TENSORS
from .metadata import MetadataValue, quote
from .part_names import PART_NAME

NUMBER_KEY, COUNT_KEY, TENSORS_KEY = "split.no", "split.count", "split.tensors.count"
MAX_FILES = 99_999

# Each file may be laid out on its own.
_OWN_KEYS = (NUMBER_KEY, "general.alignment")


def open_model_file(path: str | os.PathLike[str]) -> GgufFile:
    """Opens a GGUF model; any one file of a split model opens all of them.

    Raises what ``open_gguf`` raises, and ``FormatError`` if a file of a split model is missing,
    misnamed or does not belong to the others.
    """
    with ExitStack() as opened:
        given = opened.enter_context(open_gguf(path))
        if _read(given, COUNT_KEY, minimum=1, default=1) == 1:
            opened.pop_all()
            return given
        paths = _paths_of(given)
    for each in paths:
        if not each.exists():
            raise FormatError(
                f"{each}: this file of the split model is missing; put all {len(paths)} files "
                "into one folder"
            )
    return _open_all(paths)


def _paths_of(given: GgufFile) -> list[Path]:
    count = _read(given, COUNT_KEY)
    match = PART_NAME.fullmatch(given.path.name)
    if match is None or int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        raise FormatError(
            f"{given.path}: one of {count} files of a split model, which must be named like "
            f"'model-00001-of-{count:05}.gguf'; give the files back their names"
        )
    return [
        given.path.with_name(f"{match['model']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]


def _open_all(paths: list[Path]) -> GgufFile:
    with ExitStack() as opened:
        first = opened.enter_context(open_gguf(paths[0]))
        _check_place(first, 0, len(paths))
        for index, path in enumerate(paths[1:], start=1):
            try:
                shard = opened.enter_context(open_gguf(path))
            except ResourceError as error:
                raise FormatError(str(error)) from None
            _check_place(shard, index, len(paths))
            _check_metadata(first, shard)
            first.join(shard)
        n_tensors = _read(first, TENSORS_KEY, maximum=MAX_TENSORS)
        if n_tensors != len(first.tensors):
            raise FormatError(
                f"{paths[0]}: metadata key '{TENSORS_KEY}' is {n_tensors}, but the {len(paths)} "
                f"files hold {len(first.tensors)} tensors; fetch all files of the model again"
            )
        opened.pop_all()
    return first


def _read(
    file: GgufFile,
    key: str,
    *,
    minimum: int = 0,
    maximum: int = MAX_FILES,
    default: int | None = None,
) -> int:
    try:
        return file.metadata.get_int(key, default=default, minimum=minimum, maximum=maximum)
    except FormatError as error:
        raise FormatError(f"{file.path}: {error}") from None


def _check_place(file: GgufFile, index: int, count: int) -> None:
    for key, expected in ((NUMBER_KEY, index), (COUNT_KEY, count)):
        value = _read(file, key)
        if value != expected:
            raise FormatError(
                f"{file.path}: metadata key '{key}' is {value}, but the name says {expected}; "
                "the file was renamed or belongs to another model"
            )


def _check_metadata(first: GgufFile, shard: GgufFile) -> None:
    for key, value in shard.metadata.items():
        if key not in _OWN_KEYS and not _is_equal(first.metadata.get(key), value):
            raise FormatError(
                f"{shard.path}: metadata key {quote(key)} differs from that of {first.path.name}; "
                "the files belong to different models"
            )


def _is_equal(ours: MetadataValue | None, theirs: MetadataValue) -> bool:
    import numpy as np

    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs

"""Packed matrices of GGUF models, kept in files: opt-in, by ``--packed-weights``.

A file serves as long as nothing changes that packed bytes are made of: the model's files (their
sizes, times, and the ends of all tensors), what of them becomes which weight and in which order of
rows, and the layout of the kernels. What cannot be read or written is one warning, and the weights
are packed as without.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .. import _core
from ..errors import EdgeH2OError, FormatError
from ..formats.fingerprint import fingerprint_tensors
from ..formats.gguf import GgufFile
from ..formats.one_at_a_time import one_at_a_time
from ..formats.packed_file import (
    PackedTable,
    open_packed,
    packed_folder,
    packed_path,
    touch,
    write_packed_file,
)
from ..models.tensors import TensorBinding

LOCK_SUFFIX = ".lock"  # of the file beside, whose lock the process has that makes it
# What is waited for: seconds, and bytes of the model per second, packed and put on the disk.
WAIT_S, WAIT_RATE = 2.0, 250e6


class KeptWeights:
    """The packed matrices of a model that is being loaded, in the file that may hold them."""

    def __init__(
        self,
        folder: str,
        core_model: _core.Model,
        file: GgufFile,
        bindings: Sequence[TensorBinding],
    ) -> None:
        self._folder, self._core_model, self._file = folder, core_model, file
        names = _core.matrix_names(core_model)
        self._matrices = [item for item in bindings if item.name in names]
        self.vectors = [item for item in bindings if item.name not in names]
        self._layout = _core.packed_layout(core_model)
        self._key = self._make_key()

    @contextmanager
    def found_or_awaited(self) -> Iterator[bool]:
        """Whether all matrices lie in the file; else they are to be packed and written meanwhile.

        Another process that does so is waited for, but no longer than that should take.
        """
        try:
            path = self._path
        except EdgeH2OError:  # to be said where it is written
            yield False
            return
        before = _file_state(path)
        if self.map():
            yield True
            return
        seconds = WAIT_S + sum(item.info.n_bytes for item in self._matrices) / WAIT_RATE
        lock = path.with_suffix(LOCK_SUFFIX)
        with one_at_a_time(lock, seconds, lambda: _file_state(path) != before):
            yield _file_state(path) != before and self.map()

    def map(self) -> bool:
        """Whether all matrices lie in the file now; else they are to be packed."""
        try:
            path = self._path
            opened = open_packed(path)
            if opened is None:
                return False
            descriptor, table = opened
            try:
                if table.key != self._key:
                    return False  # of what the model was before
                self._map(path, descriptor, table)
            finally:
                os.close(descriptor)
        except EdgeH2OError as error:
            _warn(f"{error}; the weights are packed anew")
            return False
        touch(path)
        return True

    def write(self) -> None:
        """Keeps the matrices that were packed, unless the model's file has changed meanwhile."""
        if self._make_key() != self._key:
            return
        described = [
            (item.name, *_core.describe_packed(self._core_model, item.name))
            for item in self._matrices
        ]

        def write(number: int, descriptor: int, offset: int) -> None:
            _core.write_packed(self._core_model, described[number][0], descriptor, offset)

        try:
            write_packed_file(self._path, self._key, self._file.path, described, write)
        except EdgeH2OError as error:
            _warn(f"packed weights are not kept: {error}")

    @property
    def _path(self) -> Path:
        return packed_path(packed_folder(self._folder), self._file.path, self._layout)

    def _map(self, path: Path, descriptor: int, table: PackedTable) -> None:
        if [each.name for each in table.matrices] != [item.name for item in self._matrices]:
            raise FormatError(f"{path}: its matrices are not those of the model")
        places = [
            (each.name, item.info.type_name, each.type_name, each.rows, each.cols, each.offset)
            for each, item in zip(table.matrices, self._matrices, strict=True)
        ]
        try:
            _core.map_packed(self._core_model, descriptor, places)
        except ValueError as error:
            raise FormatError(f"{path}: {error}") from None
        except OSError as error:
            raise FormatError(f"{path}: cannot be mapped: {error.strerror}") from None

    def _make_key(self) -> str:
        infos = {item.info.name: item.info for item in self._matrices}
        files = {id(file): file for file in map(self._file.source, infos.values())}
        states = [os.fstat(file.fileno()) for file in files.values()]
        parts = [repr([(each.st_size, each.st_mtime_ns) for each in states]).encode()]
        parts.append(repr(self._layout).encode())
        for item in self._matrices:
            place = (item.name, item.info.name, item.first_row, item.n_rows, item.is_transposed)
            parts.append(repr(place).encode())
            parts.append(b"" if item.row_order is None else item.row_order.tobytes())
        return fingerprint_tensors(self._file, infos.values(), *parts)


def _file_state(path: Path) -> tuple[int, int] | None:
    """By which a file that was replaced differs from the one before."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_ino, state.st_size


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)

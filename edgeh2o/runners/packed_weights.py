"""Packed matrices of GGUF models, kept in files: opt-in, by ``--packed-weights``.

A file serves as long as nothing changes that packed bytes are made of: the model's files (their
sizes, times, and the ends of all tensors), what of them becomes which weight and in which order of
rows, and the layout of the kernels. What cannot be read or written is one warning, and the weights
are packed as without. A model that memory does not hold runs from such a file alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .. import _core
from ..errors import EdgeH2OError, FormatError, ResourceError
from ..formats.fingerprint import fingerprint_tensors
from ..formats.gguf import GgufFile
from ..formats.one_at_a_time import one_at_a_time
from ..formats.open_file import unreadable
from ..formats.packed_file import (
    PackedTable,
    PackedWriter,
    open_packed,
    packed_folder,
    packed_path,
    touch,
    write_packed_file,
)
from ..models.tensors import TensorBinding
from .weight_loading import OnBytes, WeightLoading, readers_of

LOCK_SUFFIX = ".lock"  # of the file beside, whose lock the process has that makes it
# What is waited for: seconds, and bytes of the model per second, packed and put on the disk.
WAIT_S, WAIT_RATE = 2.0, 250e6
PART_BYTES = 256 * 2**20  # of matrices that are packed before they are written
TABLE_ROW_BYTES = 128  # about, of a matrix in the file's table, and what aligns it
# Of memory that does not hold all weights, what is left to pages of the file: two layers' or so,
# and what is asked for of experts (cpp/model/read_ahead.cc).
PAGES_BYTES, EXPERT_PAGES_BYTES, PAGES_PART = 64 * 2**20, 256 * 2**20, 8


class _UnreadableModel(Exception):
    """What is wrong with the model, and not with where its packed weights go."""

    def __init__(self, cause: EdgeH2OError) -> None:
        self.cause = cause


class KeptWeights:
    """The packed matrices of a model that is being loaded, in the file that holds them.

    ``new_model()`` makes another empty model like ``core_model``. ``room`` is how many bytes of
    weights memory holds, where that is not all of them: then some matrices are taken into memory,
    and the others are read whenever they are needed.
    """

    def __init__(
        self,
        folder: str,
        core_model: _core.Model,
        new_model: Callable[[], _core.Model],
        file: GgufFile,
        bindings: Sequence[TensorBinding],
        room: int | None = None,
    ) -> None:
        self._folder, self._file, self._room = folder, file, room
        self._core_model, self._new_model = core_model, new_model
        names = _core.matrix_names(core_model)
        self._matrices = [item for item in bindings if item.name in names]
        self.vectors = [item for item in bindings if item.name not in names]
        self._layout = _core.packed_layout(core_model)
        self._key = self._make_key()

    def map_or_make(self, on_bytes: OnBytes | None = None) -> bool:
        """Maps all matrices, packed and written before unless they are there; else they are not.

        Another process that packs them is waited for, but no longer than that should take.
        ``on_bytes(done, total)`` counts what is packed, or taken into memory. Raises FormatError
        and ResourceError for a model that cannot be read, and ResourceError where packed weights
        cannot be kept of one that memory does not hold.
        """
        try:
            path = self._path
            before = _file_state(path)
            if self._map(path, on_bytes):
                return True
            seconds = WAIT_S + self._n_bytes / WAIT_RATE
            lock = path.with_suffix(LOCK_SUFFIX)
            with one_at_a_time(lock, seconds, lambda: _file_state(path) != before):
                if _file_state(path) != before and self._map(path, on_bytes):
                    return True
                self._write(path, on_bytes)
            if not self._map(path, on_bytes):
                raise ResourceError(f"{path} cannot be used")
            return True
        except _UnreadableModel as error:
            raise error.cause from None
        except EdgeH2OError as error:
            if self._room is not None:
                raise ResourceError(
                    f"{self._file.path} does not fit in memory, and its packed weights cannot be "
                    f"kept: {error}"
                ) from None
            _warn(f"packed weights are not kept: {error}")
            return False

    def _write(self, path: Path, on_bytes: OnBytes | None) -> None:
        """Packs matrices and writes them, ``PART_BYTES`` at a time."""
        n_bytes = sum(item.held_bytes + TABLE_ROW_BYTES for item in self._matrices)
        n_done = 0

        def report(done: int, _: int) -> None:
            if on_bytes is not None:
                on_bytes(n_done + done, self._n_bytes)

        def write(writer: PackedWriter) -> None:
            nonlocal n_done
            for part in self._parts():
                core_model = self._pack(part, report)
                n_done += sum(item.n_bytes for item in part)
                for item in part:
                    described = _core.describe_packed(core_model, item.name)
                    offset = writer.add(item.name, *described)
                    _core.write_packed(core_model, item.name, writer.descriptor, offset)
            if self._make_key() != self._key:
                raise ResourceError(f"{self._file.path} was changed while it was read")

        write_packed_file(path, self._key, self._file.path, n_bytes, write)

    def _parts(self) -> Iterator[list[TensorBinding]]:
        part: list[TensorBinding] = []
        for item in self._matrices:
            if part and sum(each.held_bytes for each in part) + item.held_bytes > PART_BYTES:
                yield part
                part = []
            part.append(item)
        if part:
            yield part

    def _pack(self, part: Sequence[TensorBinding], on_bytes: OnBytes) -> _core.Model:
        core_model = self._new_model()
        n_bytes = sum(item.n_bytes for item in part)
        try:
            with WeightLoading(readers_of(core_model, self._file, part), n_bytes) as loading:
                loading.wait(on_bytes)
        except EdgeH2OError as error:  # it may be a ValueError too
            raise _UnreadableModel(error) from None
        except ValueError as error:
            raise _UnreadableModel(FormatError(f"{self._file.path}: {error}")) from None
        except MemoryError:
            raise ResourceError(f"no memory for {n_bytes} bytes of weights") from None
        return core_model

    def _map(self, path: Path, on_bytes: OnBytes | None) -> bool:
        """Whether all matrices lie in the file now; else they are to be packed."""
        try:
            opened = open_packed(path)
            if opened is None:
                return False
            descriptor, table = opened
            try:
                if table.key != self._key:
                    return False  # of what the model was before
                self._map_table(path, descriptor, table)
                self._hold(descriptor, table, on_bytes)
            finally:
                os.close(descriptor)
        except EdgeH2OError as error:
            _warn(f"{error}; the weights are packed anew")
            return False
        touch(path)
        return True

    def _hold(self, descriptor: int, table: PackedTable, on_bytes: OnBytes | None) -> None:
        """Takes matrices into memory as long as there is room beside pages of the others.

        Those that every token goes through: of experts the system keeps the ones asked for, and
        of embeddings that are no output matrix the rows.
        """
        if self._room is None:
            return
        has_experts = any("_exps." in each.name for each in table.matrices)
        pages = EXPERT_PAGES_BYTES if has_experts else PAGES_BYTES
        left = self._room - max(pages, self._room // PAGES_PART)
        held = []
        has_output = any(each.name == "output.weight" for each in table.matrices)
        output = "output.weight" if has_output else "token_embd.weight"
        for each in table.matrices:
            is_in_layer = each.name.startswith("blk.") and "_exps." not in each.name
            if (is_in_layer or each.name == output) and each.n_bytes <= left:
                held.append(each)
                left -= each.n_bytes
        n_bytes, n_done = sum(each.n_bytes for each in held), 0
        for each in held:
            try:
                _core.hold_packed(self._core_model, each.name, descriptor, each.offset)
            except OSError as error:
                raise unreadable(self._path, error) from None
            n_done += each.n_bytes
            if on_bytes is not None:
                on_bytes(n_done, n_bytes)

    @property
    def _n_bytes(self) -> int:
        return sum(item.n_bytes for item in self._matrices)

    @property
    def _path(self) -> Path:
        return packed_path(packed_folder(self._folder), self._file.path, self._layout)

    def _map_table(self, path: Path, descriptor: int, table: PackedTable) -> None:
        if [each.name for each in table.matrices] != [item.name for item in self._matrices]:
            raise FormatError(f"{path}: its matrices are not those of the model")
        places = [
            (each.name, item.info.type_name, each.type_name, each.rows, each.cols, each.offset)
            for each, item in zip(table.matrices, self._matrices, strict=True)
        ]
        try:
            _core.map_packed(self._core_model, descriptor, places, self._room is not None)
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

"""The bytes of ONNX tensors: checked before anybody uses them, mapped instead of read.

An ONNX file names the files of its weights. onnxruntime follows such names out of the folder (1.23,
the newest for Python 3.10, follows `..`, absolute paths and links), so they are opened here, one
path component after the other. onnxruntime is handed mapped memory, or the names of files that
were opened so and are still the same once it has read them.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError, ResourceError
from ..formats.metadata import quote
from .messages import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ELEMENTS = 2**40
_CURE = "the file is damaged or was made to do harm; fetch the model again from its publisher"

# By TensorProto.DataType. Strings and complex numbers have no place in a decoder.
_DTYPES = {
    1: "<f4",
    2: "u1",
    3: "i1",
    4: "<u2",
    5: "<i2",
    6: "<i4",
    7: "<i8",
    9: "?",
    10: "<f2",
    11: "<f8",
    12: "<u4",
    13: "<u8",
}
# Bits per element, of types that NumPy lacks too: BFLOAT16, four kinds of FLOAT8, UINT4 and INT4.
_BITS = {kind: 8 * np.dtype(dtype).itemsize for kind, dtype in _DTYPES.items()}
_BITS |= {16: 16, 17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4}
_ELEM_TYPES = {np.dtype(name): kind for kind, name in _DTYPES.items()}
# The fields of a TensorProto for single numbers, and how those of a type are held there.
_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _DOUBLE_DATA, _UINT64_DATA = 4, 5, 7, 10, 11
_FIELDS = {1: _FLOAT_DATA, 7: _INT64_DATA, 11: _DOUBLE_DATA, 12: _UINT64_DATA, 13: _UINT64_DATA}


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """A constant of the graph: its element type (TensorProto.DataType), shape and bytes.

    ``offset`` is where they begin in a mapped file, None elsewhere; ``location`` is that file's
    name in the model's folder.
    """

    name: str
    elem_type: int
    shape: tuple[int, ...]
    data: memoryview
    offset: int | None = None
    location: str = ""

    @property
    def has_dtype(self) -> bool:
        """Whether NumPy has the type."""
        return self.elem_type in _DTYPES

    def array(self) -> NDArray[Any]:
        """A read-only view in the shape of the tensor. Raises FormatError for a type unlike any."""
        dtype = _DTYPES.get(self.elem_type)
        if dtype is None:
            raise FormatError(
                f"tensor {quote(self.name)} is of element type {self.elem_type}, which cannot be "
                "read here; export the model with float or MatMulNBits weights"
            )
        return np.frombuffer(self.data, dtype).reshape(self.shape)

    def release(self) -> None:
        """Gives back the memory of a mapped tensor; what is read again comes from the file."""
        file = self.data.obj
        if self.offset is None or not isinstance(file, mmap.mmap):
            return
        first = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self.offset + len(self.data)) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            file.madvise(mmap.MADV_DONTNEED, first, end - first)


class ExternalFiles:
    """Maps the weight files of one model, all inside its folder.

    Raises FormatError for a name that leads elsewhere, ResourceError for what cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, memoryview] = {}
        self._opened: dict[str, tuple[int, int]] = {}
        self._ranges: dict[str, dict[tuple[int, int], str]] = {}

    def read(self, tensor: Tensor) -> OnnxTensor:
        """A tensor whose data lies in another file."""
        entries = _read_entries(tensor)
        location = entries.get("location", "")
        expected = tensor_bytes(tensor)
        offset = _read_count(tensor, entries, "offset", default=0)
        length = _read_count(tensor, entries, "length", default=expected)
        if length != expected:
            raise FormatError(
                f"tensor {quote(tensor.name)} needs {expected} bytes by its shape and type, but "
                f"its external data has length {length}; {_CURE}"
            )
        data = self._map(location, tensor.name)
        if offset + length > len(data):
            raise FormatError(
                f"tensor {quote(tensor.name)} ends at byte {offset + length} of "
                f"{quote(location)}, which has {len(data)}; the file is incomplete, fetch it again"
            )
        self._ranges.setdefault(location, {}).setdefault((offset, length), tensor.name)
        data = data[offset : offset + length]
        return OnnxTensor(tensor.name, tensor.elem_type, tensor.dims, data, offset, location)

    def check_places(self, locations: Iterable[str]) -> None:
        """Raises FormatError unless files that are opened again by name are those checked here."""
        for location in locations:
            try:
                info = os.stat(self._folder / location, follow_symlinks=False)
            except OSError:
                info = None
            if info is None or (info.st_dev, info.st_ino) != self._opened[location]:
                raise FormatError(
                    f"the file {quote(location)} was replaced while it was read; load it again"
                )

    def check_overlaps(self) -> None:
        """Refuses tensors that share a part of their bytes; the same bytes may serve several."""
        for location, ranges in self._ranges.items():
            end, before = 0, ""
            for (offset, length), name in sorted(ranges.items()):
                if offset < end and length:
                    raise FormatError(
                        f"tensors {quote(before)} and {quote(name)} overlap in "
                        f"{quote(location)}; {_CURE}"
                    )
                end, before = max(end, offset + length), name

    def _map(self, location: str, tensor: str) -> memoryview:
        if location not in self._maps:
            try:
                descriptor = _open_inside(self._folder, location, tensor)
            except OSError as error:
                raise ResourceError(
                    f"the weights of tensor {quote(tensor)} are in {quote(location)} beside the "
                    f"model, which cannot be read: {error.strerror}; fetch that file too"
                ) from None
            try:
                self._maps[location] = map_descriptor(descriptor)
                info = os.fstat(descriptor)
                self._opened[location] = (info.st_dev, info.st_ino)
            except OSError as error:
                raise ResourceError(
                    f"{quote(location)}, which holds weights, cannot be mapped into memory: "
                    f"{error.strerror}; raise the limit of the address space (ulimit -v)"
                ) from None
            finally:
                os.close(descriptor)
        return self._maps[location]


def map_descriptor(descriptor: int) -> memoryview:
    """The whole of an open file, read-only; empty for an empty one."""
    if os.fstat(descriptor).st_size == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor by its type and shape. Raises FormatError if it can have none."""
    bits = _BITS.get(tensor.elem_type)
    if bits is None:
        raise FormatError(
            f"tensor {quote(tensor.name)} is of element type {tensor.elem_type}, which no weight "
            "has; export the model again"
        )
    n_elements = math.prod(tensor.dims)
    if any(dim < 0 for dim in tensor.dims) or n_elements > MAX_ELEMENTS:
        raise FormatError(f"tensor {quote(tensor.name)} has shape {list(tensor.dims)}; {_CURE}")
    return int(-(-n_elements * bits // 8))


def element_type(dtype: np.dtype[Any]) -> int:
    """The TensorProto.DataType of a NumPy type. Raises KeyError if it has none."""
    return _ELEM_TYPES[dtype]


def number_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor that holds them itself, raw or as single numbers.

    Raises FormatError if they are elsewhere, or not as many as its shape says.
    """
    expected = tensor_bytes(tensor)
    if tensor.external is not None or tensor.has_segment:
        raise FormatError(
            f"constant {quote(tensor.name)} lies outside of the graph, where only weights may; "
            f"{_CURE}"
        )
    data = tensor.raw
    if data is None:
        data = _pack_numbers(tensor)
    if len(data) != expected:
        raise FormatError(
            f"constant {quote(tensor.name)} of shape {list(tensor.dims)} has {len(data)} bytes "
            f"instead of {expected}; the file is damaged, fetch it again"
        )
    return data


def _pack_numbers(tensor: Tensor) -> bytes:
    kind = tensor.elem_type
    found = (tensor.numbers or {}).get(_FIELDS.get(kind, _INT32_DATA), b"")
    if isinstance(found, bytes):
        return found
    # Halves and what NumPy lacks are there as their bits, two of 4 bits in one number.
    bits = np.asarray(found, np.int64).astype(f"<i{max(1, _BITS[kind] // 8)}")
    return bits.tobytes()


def _read_entries(tensor: Tensor) -> Mapping[str, str]:
    entries: dict[str, str] = {}
    for key, value in tensor.external or ():
        if key in entries:
            raise FormatError(
                f"tensor {quote(tensor.name)} gives {quote(key)} of its external data "
                f"twice; {_CURE}"
            )
        entries[key] = value
    return entries


def _read_count(tensor: Tensor, entries: Mapping[str, str], key: str, *, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise FormatError(
            f"the {key} of the external data of tensor {quote(tensor.name)} is "
            f"{quote(text)}, which is no number of bytes; {_CURE}"
        )
    return int(text)


def _open_inside(folder: Path, location: str, tensor: str) -> int:
    """Opens a file below ``folder`` without following links; the caller closes it."""
    parts = location.split("/")
    if (
        not location
        or "\0" in location
        or "\\" in location
        or "*" in location  # onnxruntime's mark for an address in memory
        or ":" in location
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise FormatError(
            f"tensor {quote(tensor)} has its data in {quote(location)}, which is not the name of "
            f"a file in the model's folder; {_CURE}"
        )
    no_follow = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for i, part in enumerate(parts):
            info = os.stat(part, dir_fd=at, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                raise _link_error(tensor, location, "a symbolic link")
            is_last = i == len(parts) - 1
            inner = os.open(part, no_follow | (0 if is_last else os.O_DIRECTORY), dir_fd=at)
            os.close(at)
            at = inner
        info = os.fstat(at)
        if not stat.S_ISREG(info.st_mode):
            raise FormatError(
                f"tensor {quote(tensor)} has its data in {quote(location)}, which is not a "
                f"regular file; {_CURE}"
            )
        if info.st_nlink > 1:
            raise _link_error(tensor, location, "a file with several names (hard links)")
        return at
    except BaseException:
        os.close(at)
        raise


def _link_error(tensor: str, location: str, what: str) -> FormatError:
    return FormatError(
        f"the weights of tensor {quote(tensor)} are in {quote(location)}, which is {what}: it may "
        "lead to a file that is none of the model's; copy the model with 'cp -rL' and use the copy"
    )

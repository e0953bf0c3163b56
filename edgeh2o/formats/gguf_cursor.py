"""Bounded reads of a GGUF header, whose bytes are untrusted: numbers, texts, arrays of texts.

Each count is checked once against the bytes that are left, before anything is allocated for it.
Memory and time are bounded by the header's real size, and that by ``MAX_HEADER_BYTES``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from .. import _core
from ..errors import FormatError
from .metadata import StoredStrings, quote

MAGIC = b"GGUF"
# The header of a 260k-token vocabulary with merges takes about 10 MiB.
MAX_HEADER_BYTES = 64 * 2**20
FIRST_READ_BYTES = 2**20

# Gives ``n_bytes`` of the file from ``offset`` on, never fewer: (offset, n_bytes) -> bytes.
ReadBytes = Callable[[int, int], bytes]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class HeaderCursor:
    """Bounded reads of a file. ``place`` is what is being read, for the messages.

    ``data`` is the file's start so far; ``require`` reads on, so that a small header costs little.
    """

    __slots__ = ("data", "end", "file_bytes", "place", "position", "read")

    def __init__(self, read: ReadBytes, file_bytes: int) -> None:
        self.read = read
        self.file_bytes = file_bytes
        self.data = b""
        self.end = min(file_bytes, MAX_HEADER_BYTES)
        self.position = len(MAGIC)
        self.place = "header"

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self.place} (at byte {self.position}): {what}")

    def require(self, n_bytes: int, what: str) -> None:
        """Checks that ``n_bytes`` are left and makes ``data`` hold them."""
        if n_bytes <= len(self.data) - self.position:
            return
        if n_bytes <= self.end - self.position:
            self.load(self.position + n_bytes)
            return
        if self.end < self.file_bytes:
            raise self.error(
                f"{what} takes {n_bytes} bytes and the header would pass "
                f"{MAX_HEADER_BYTES} bytes; the file is damaged"
            )
        raise self.error(
            f"{what} takes {n_bytes} bytes, but the file has {self.end - self.position} left; "
            "it is truncated or damaged, fetch it again"
        )

    def load(self, stop: int) -> None:
        """Makes ``data`` reach ``stop`` at least; doubling keeps the copies few."""
        stop = min(max(stop, 2 * len(self.data), FIRST_READ_BYTES), self.end)
        self.data += self.read(len(self.data), stop - len(self.data))

    def scalar(self, code: struct.Struct, what: str) -> int | float:
        self.require(code.size, what)
        value: int | float = code.unpack_from(self.data, self.position)[0]
        self.position += code.size
        return value

    def u32(self, what: str) -> int:
        return int(self.scalar(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.scalar(_U64, what))

    def count(self, what: str, min_item_bytes: int, limit: int) -> int:
        """A count of entries that follow, each of at least ``min_item_bytes`` bytes."""
        value = self.u64(what)
        if value > limit:
            raise self.error(f"{what} is {value}, at most {limit} are read; the file is damaged")
        self.require(value * min_item_bytes, f"{what} is {value}, which")
        return value

    def string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise self.error(f"{what} has {length} bytes, at most {limit} are read")
        self.require(length, what)
        raw = self.data[self.position : self.position + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as problem:
            raise self.error(f"{what} is not UTF-8 text: {problem.reason}") from None
        self.position += length
        return text

    def name(self, what: str, limit: int) -> str:
        text = self.string(what, limit)
        if not text:
            raise self.error(f"{what} is empty")
        if "\0" in text:
            raise self.error(f"{what} {quote(text)} contains a NUL byte")
        return text

    def strings(self, count: int) -> StoredStrings:
        """An array of strings, each a length and its bytes."""
        begin = self.position
        n_found = 0
        while n_found < count:
            n_found += self._pass_strings(count - n_found)
            if n_found == count:
                break
            stop = self._end_of_string(n_found)
            if stop > self.end:
                is_whole_file = self.end == self.file_bytes
                limit = "end of the file" if is_whole_file else "largest header that is read"
                raise self.error(
                    f"item {n_found} of {count} strings reaches beyond the {limit}; "
                    "the file is truncated or damaged, fetch it again"
                )
            self.load(stop)
        return StoredStrings(self.data[begin : self.position], count)

    def _pass_strings(self, count: int) -> int:
        """Moves behind those of ``count`` strings that ``data`` holds; returns their number.

        In C++: a loop of Python's would be nearly all of the time of opening a file.
        """
        n_found, self.position = _core.count_strings(self.data, self.position, count)
        return n_found

    def _end_of_string(self, index: int) -> int:
        """Where the string that could not be passed ends, or its length as long as that is cut.

        Raises FormatError for one that is there whole, and so is not UTF-8.
        """
        start = self.position + _U64.size
        if start > len(self.data):
            return start
        stop = start + int(_U64.unpack_from(self.data, self.position)[0])
        if stop <= len(self.data):
            self.position = start
            try:
                self.data[start:stop].decode("utf-8")
            except UnicodeDecodeError as problem:
                message = f"item {index} is not UTF-8 text: {problem.reason}"
                raise self.error(message) from None
        return stop

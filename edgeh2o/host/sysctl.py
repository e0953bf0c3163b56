"""What macOS tells of the machine by name; nothing on other systems."""

from __future__ import annotations

import sys


def read_text(name: str) -> str | None:
    """A value that is text, such as "machdep.cpu.brand_string"; None where there is none."""
    value = _read(name)
    return None if value is None else value.rstrip(b"\0").decode("utf-8", "replace").strip()


def read_int(name: str) -> int | None:
    """A value that is a whole number of 4 or 8 bytes; None where there is none."""
    value = _read(name)
    return int.from_bytes(value, sys.byteorder) if value and len(value) in (4, 8) else None


def _read(name: str) -> bytes | None:
    """By sysctlbyname(3), which is asked for the size first."""
    if sys.platform != "darwin":
        return None
    import ctypes

    library = ctypes.CDLL(None)
    key, n_bytes = name.encode("ascii"), ctypes.c_size_t()
    if library.sysctlbyname(key, None, ctypes.byref(n_bytes), None, ctypes.c_size_t(0)) != 0:
        return None
    value = ctypes.create_string_buffer(n_bytes.value)
    if library.sysctlbyname(key, value, ctypes.byref(n_bytes), None, ctypes.c_size_t(0)) != 0:
        return None
    return value.raw[: n_bytes.value]

"""The optional package that ONNX models need: whoever imports it from here has it.

Importing this module raises UsageError, with the cure, if it is missing, and ResourceError where
the limit of the address space has no room for it.
"""

from __future__ import annotations

import os
import re

from ..errors import EdgeH2OError, ResourceError, UsageError, is_shortage
from ..host import memory

# What onnxruntime says where nothing more can be mapped, beside what ``is_shortage`` knows.
_NO_MEMORY = re.compile("cannot allocate|failed to allocate|bad_?alloc|PosixThread", re.IGNORECASE)


def address_error(error: Exception, what: str) -> ResourceError | None:
    """The error for ``what`` if that is what a limit of the address space does, else None."""
    addresses = memory.address_space_left_bytes()
    is_short = is_shortage(error) or _NO_MEMORY.search(str(error))
    return memory.does_not_hold(addresses, what) if addresses is not None and is_short else None


def explain_import(error: Exception) -> EdgeH2OError:
    """What is to be said about onnxruntime that could not be imported."""
    return address_error(error, "onnxruntime") or UsageError(
        f"ONNX models need the package onnxruntime ({error}); install it with "
        "pip install 'edgeh2o[onnx]'"
    )


# Newer wheels would send Microsoft what is run and keep an id of the machine. Who sets it, decides.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

try:
    import onnxruntime
except (ImportError, MemoryError) as error:
    raise explain_import(error) from None

__all__ = ["address_error", "explain_import", "onnxruntime", "require_runtime"]

MIN_RUNTIME = (1, 23)


def require_runtime() -> None:
    """Raises UsageError for an onnxruntime that is too old, with the reason."""
    version = onnxruntime.__version__
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < MIN_RUNTIME:
        least = ".".join(map(str, MIN_RUNTIME))
        raise UsageError(
            f"onnxruntime {version} is too old for ONNX models: {least} or newer is needed (up to "
            "1.19 its GroupQueryAttention is wrong for a prompt in pieces, and 1.23 is the oldest "
            f"that is tested); pip install 'onnxruntime>={least}'"
        )

"""The optional package that ONNX models need: whoever imports it from here has it.

Importing this module raises UsageError, with the cure, if it is missing.
"""

from __future__ import annotations

from ..errors import UsageError

try:
    import onnxruntime
except ImportError as error:
    raise UsageError(
        f"ONNX models need the package onnxruntime ({error}); install it with "
        "pip install 'edgeh2o[onnx]'"
    ) from None

__all__ = ["onnxruntime", "require_runtime"]

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

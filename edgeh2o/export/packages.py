"""The optional package that writes ONNX models: whoever imports it from here has it.

Importing this module raises UsageError, with the cure, if it is missing.
"""

from __future__ import annotations

from ..errors import UsageError, is_shortage

try:
    import onnx
except ImportError as error:
    if is_shortage(error):
        raise
    raise UsageError(
        f"writing ONNX models needs the package onnx ({error}); install it with "
        "pip install 'edgeh2o[onnx]'"
    ) from None

__all__ = ["onnx"]

"""Model families, declared: which keys and tensors a file of each architecture holds."""

from __future__ import annotations

from . import llama as _llama  # noqa: F401  (registers the architecture)
from .spec import (
    ArchitectureSpec,
    TensorBinding,
    TensorRule,
    read_model,
    register_architecture,
    registered_architectures,
    tensor,
)

__all__ = [
    "ArchitectureSpec",
    "TensorBinding",
    "TensorRule",
    "read_model",
    "register_architecture",
    "registered_architectures",
    "tensor",
]

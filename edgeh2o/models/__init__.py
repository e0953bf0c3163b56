"""Model families, declared: which keys and tensors a file of each architecture holds."""

from __future__ import annotations

from .reader import read_model
from .spec import ArchitectureSpec, register_architecture, registered_architectures
from .tensors import TensorBinding, TensorPart, TensorRule, tensor

__all__ = [
    "ArchitectureSpec",
    "TensorBinding",
    "TensorPart",
    "TensorRule",
    "read_model",
    "register_architecture",
    "registered_architectures",
    "tensor",
]

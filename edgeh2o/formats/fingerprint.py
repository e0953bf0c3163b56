"""Hashes that tell model files apart, and models, without reading them whole."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from .gguf_header import TensorInfo
from .metadata import Metadata

if TYPE_CHECKING:
    from .gguf import GgufFile

DIGEST_BYTES = 16
# Read of either end of each tensor.
SAMPLE_BYTES = 4096


class Fingerprint:
    """Made of all metadata, and of every tensor's name, type, shape, first and last 4 KiB.

    Weights that differ only inside of tensors are not told apart.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        for key, value in metadata.items():
            self._hash.update(f"{key}={type(value).__name__}\n".encode())
            if isinstance(value, tuple):
                self._hash.update("\0".join(value).encode("utf-8", "surrogatepass"))
            elif isinstance(value, (bool, int, float, str)):
                self._hash.update(repr(value).encode("utf-8", "backslashreplace"))
            else:
                self._hash.update(value.tobytes())

    def add(self, file: GgufFile, info: TensorInfo) -> None:
        """Adds a tensor of ``file``, of which it reads the ends."""
        self._hash.update(f"{info.name!a}:{info.type_name}:{info.shape}\n".encode())
        for end in file.tensor_ends(info, SAMPLE_BYTES):
            self._hash.update(end)

    def hexdigest(self) -> str:
        """The fingerprint in hexadecimal."""
        return self._hash.hexdigest()


def fingerprint_weights(file: GgufFile) -> str:
    """Hexadecimal digest that all quantisations of one model share, and no other model.

    It is made of the tensors' names and shapes and of the vectors' contents (norm weights,
    biases), which quantisation leaves as they are.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(file.tensors):
        info = file.tensors[name]
        digest.update(f"{name}\0{info.shape}\0".encode())
        if len(info.shape) == 1:
            digest.update(file.tensor_bytes(info))
    return digest.hexdigest()

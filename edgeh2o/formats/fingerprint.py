"""Hashes that tell model files apart, and models, without reading them whole."""

from __future__ import annotations

# What hashlib offers as blake2b; hashlib would load OpenSSL too, 4 ms for every run of a model.
from _blake2 import blake2b
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .gguf_header import TensorInfo
    from .model_tensors import ModelTensors


class TensorEnds(Protocol):
    """A file with tensors, of which both ends can be read."""

    def tensor_ends(self, info: TensorInfo, n_bytes: int) -> tuple[memoryview, memoryview]:
        """The first and the last stored bytes of a tensor, ``n_bytes`` or fewer."""


DIGEST_BYTES = 16
# Read of either end of each tensor.
SAMPLE_BYTES = 4096


def fingerprint_file(file: ModelTensors, tensors: Iterable[TensorInfo]) -> str:
    """Hexadecimal digest of all metadata, and of the name, type, shape and ends of ``tensors``.

    Weights that differ only inside of tensors, beyond 4 KiB from either end, are not told apart.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for key, value in file.metadata.items():
        digest.update(f"{key}={type(value).__name__}\n".encode())
        if isinstance(value, tuple):
            digest.update("\0".join(value).encode("utf-8", "surrogatepass"))
        elif isinstance(value, (bool, int, float, str)):
            digest.update(repr(value).encode("utf-8", "backslashreplace"))
        else:
            digest.update(value.tobytes())
    _update_by_tensors(digest, file, tensors)
    return digest.hexdigest()


def with_adapters(fingerprint: str, adapters: Iterable[str], scales: Iterable[float]) -> str:
    """The fingerprint of a file whose weights adapters of fingerprints ``adapters`` change.

    Those of scale 0 do not; without any it is the file's own.
    """
    counting = [f"{each}*{scale!r}" for each, scale in zip(adapters, scales, strict=True) if scale]
    if not counting:
        return fingerprint
    digest = blake2b((fingerprint + "+".join(counting)).encode(), digest_size=DIGEST_BYTES)
    return digest.hexdigest()


def fingerprint_tensors(file: TensorEnds, tensors: Iterable[TensorInfo], *more: bytes) -> str:
    """As ``fingerprint_file``, of ``more`` bytes in place of the metadata."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in more:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    _update_by_tensors(digest, file, tensors)
    return digest.hexdigest()


def _update_by_tensors(digest: blake2b, file: TensorEnds, tensors: Iterable[TensorInfo]) -> None:
    for info in tensors:
        digest.update(f"{info.name!a}:{info.type_name}:{info.shape}\n".encode())
        for end in file.tensor_ends(info, SAMPLE_BYTES):
            digest.update(end)


def fingerprint_weights(file: ModelTensors) -> str:
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

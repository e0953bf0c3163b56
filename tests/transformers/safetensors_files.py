"""Writes safetensors files; needs NumPy alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]], dtype: str) -> None:
    """Writes float32 arrays as F32, F16 or BF16 (rounded towards zero), bytes as U8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, end = [], 0
    for name, values in tensors.items():
        kind = "U8" if values.dtype == np.uint8 else dtype
        blob = _encode(np.ascontiguousarray(values), kind)
        offsets = [end, end + len(blob)]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": offsets}
        blobs.append(blob)
        end += len(blob)
    write_raw(path, header, b"".join(blobs))


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a file of F32."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    tensors = {}
    for name, item in header.items():
        if name != "__metadata__":
            first, last = (start + offset for offset in item["data_offsets"])
            tensors[name] = np.frombuffer(data[first:last], "<f4").reshape(item["shape"])
    return tensors


def write_raw(path: Path, header: object, data: bytes) -> None:
    """A safetensors file of any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _encode(values: NDArray[Any], dtype: str) -> bytes:
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2", "U8": "u1"}[dtype]).tobytes()

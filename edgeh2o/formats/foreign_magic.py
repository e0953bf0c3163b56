"""Recognises files that are often given in place of a GGUF file, to say what they are."""

from __future__ import annotations

import struct

_PREFIXES: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a ZIP archive (a wheel, .npz or PyTorch file); unpack or convert it"),
    (b"\x1f\x8b", "a gzip archive; unpack it"),
    (b'{"', "JSON, perhaps what a server says of an error; fetch the file itself"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model; run 'git lfs pull'"),
    (b"lmgg", "an old GGML file from before GGUF; convert the original model again"),
    (b"fmgg", "an old GGMF file from before GGUF; convert the original model again"),
    (b"tjgg", "an old GGJT file from before GGUF; convert the original model again"),
    (b"algg", "an old GGLA adapter file; give the base model as GGUF"),
    (b"FUGG", "a byte-swapped GGUF file; convert it to little-endian"),
)
_HTML_STARTS = (b"<!doctype", b"<html", b"<head", b"<?xml")
# ONNX files begin with field 1 (ir_version, a small varint) and go on with another low field.
_ONNX_FIRST_FIELD = 0x08
_ONNX_NEXT_FIELDS = b"\x12\x1a\x22\x2a\x32\x3a\x42"
_MAX_ONNX_IR_VERSION = 30

PROBE_BYTES = 64


def describe_foreign_file(start: bytes) -> str | None:
    """What a file is whose first ``PROBE_BYTES`` bytes are ``start``, or None if not known."""
    for prefix, description in _PREFIXES:
        if start.startswith(prefix):
            return description
    if start.lstrip().lower().startswith(_HTML_STARTS):
        return "a web page; the link led to a page and not to the file, fetch the file itself"
    if len(start) >= 10 and start[8:9] == b"{" and struct.unpack_from("<Q", start)[0] < 2**32:
        return "a safetensors file; give its folder, with config.json and tokenizer.json"
    is_onnx = (
        len(start) >= 3
        and start[0] == _ONNX_FIRST_FIELD
        and 1 <= start[1] <= _MAX_ONNX_IR_VERSION
        and start[2] in _ONNX_NEXT_FIELDS
    )
    return "an ONNX (protobuf) file, not GGUF" if is_onnx else None

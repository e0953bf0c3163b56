"""Runs the llama-tokenize program of llama.cpp on files with nothing but a vocabulary."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def peer_arguments(doc: str | None) -> argparse.ArgumentParser:
    """A command line with the program and what to call it; ``doc`` begins with its description."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--llama-tokenize", required=True, type=Path, metavar="PROGRAM")
    parser.add_argument("--version", required=True, help="what to call that llama.cpp")
    return parser


def tokenize_with_peer(
    program: Path, model: Path, texts: Sequence[str], *, separator: str, separator_id: int
) -> list[list[int]]:
    """Return llama.cpp's ids of each text, control tokens parsed, without BOS and EOS."""
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_bytes(separator.join(texts).encode("utf-8"))
        command = [program, "-m", model, "--ids", "--no-bos", "--log-disable", "-f", prompt]
        output = subprocess.run(command, capture_output=True, check=True, timeout=600).stdout
    found: list[list[int]] = [[]]
    for token_id in ast.literal_eval(output.decode("ascii").strip().splitlines()[-1]):
        if token_id == separator_id:
            found.append([])
        else:
            found[-1].append(token_id)
    return found


def write_golden(
    path: Path, version: str, texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> None:
    """Write the ids of each text, which the llama-tokenize called ``version`` gave, a line each."""
    made_by = json.dumps("llama-tokenize of " + version)
    lines = ",\n".join(f"    {json.dumps(text)}" for text in texts)
    rows = ",\n".join(f"    {json.dumps(row)}" for row in ids)
    path.write_text(
        f'{{\n  "made_by": {made_by},\n  "texts": [\n{lines}\n  ],\n  "ids": [\n{rows}\n  ]\n}}\n',
        "ascii",
    )


def write_vocabulary(path: Path, metadata: Mapping[str, object]) -> None:
    """Write a GGUF file with these keys and no tensors that llama-tokenize opens."""
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "gpt2")
    for add in (writer.add_block_count, writer.add_head_count):
        add(1)
    for add in (writer.add_context_length, writer.add_embedding_length):
        add(64)
    writer.add_feed_forward_length(64)
    writer.add_layer_norm_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, np.ndarray) and value.dtype == np.uint8:
            writer.add_array(key, value.tobytes())
        elif isinstance(value, np.ndarray):
            writer.add_array(key, value.tolist())
        elif isinstance(value, Sequence):
            writer.add_array(key, value)
        else:
            raise TypeError(f"{key} cannot be written: {value!r}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

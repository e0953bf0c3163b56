"""Fuzz target of files of packed weights: their table, under a hash that is right.

python -m tools.fuzz_packed --seconds 60 [--corpus DIR]

An input is the JSON text of the matrices of a table.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.fuzz_gguf import SMALLEST
from tools.fuzz_loop import instrumented_imports, run_fuzzer
from tools.make_tiny_model import write_tiny_model

with instrumented_imports():
    from edgeh2o.errors import FormatError
    from edgeh2o.formats.packed_file import PackedTable, open_packed, seal_packed
    from edgeh2o.runners.native import NativeModelFile


def _make_kept(folder: Path) -> tuple[Path, Path]:
    """A small model, and the file of its packed weights."""
    model = write_tiny_model(folder / "model.gguf", tensor_type="Q4_0", **SMALLEST)
    with NativeModelFile(model, packed_weights=str(folder)) as file:
        file.load()
    (kept,) = folder.glob("*.packed")
    return model, kept


def _read(kept: Path) -> tuple[PackedTable, bytes]:
    """What it says, and its bytes up to the table."""
    opened = open_packed(kept)
    assert opened is not None
    os.close(opened[0])
    last = opened[1].matrices[-1]
    return opened[1], kept.read_bytes()[: last.offset + last.n_bytes]


def make_seeds() -> Iterator[bytes]:
    """The matrices of a model like that of the target."""
    with tempfile.TemporaryDirectory() as folder:
        table, _ = _read(_make_kept(Path(folder))[1])
        yield json.dumps(table.matrices).encode()


def make_target(folder: Path) -> Callable[[bytes], None]:
    """Maps what the table says of the model, as far as it is taken, and looks at all of it."""
    model, kept = _make_kept(folder)
    table, matrices = _read(kept)
    head = json.dumps({"key": table.key, "model": table.model}).encode()[:-1]

    def read(content: bytes) -> None:
        with kept.open("wb") as file:
            file.write(matrices)
            file.flush()
            text = head + b', "matrices": ' + content + b"}"
            seal_packed(kept, file.fileno(), text, len(matrices))
        with (
            warnings.catch_warnings(record=True) as caught,
            NativeModelFile(model, packed_weights=str(folder)) as opened,
        ):
            warnings.simplefilter("always")
            loaded = opened.load()
            for item in opened._bindings:
                loaded.dequantize(item.name)
        if caught:  # an outcome of its own
            raise FormatError(str(caught[0].message))

    return read


def main() -> int:
    """Command line entry; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        return run_fuzzer(make_target(Path(folder)), make_seeds(), name="fuzz_packed")


if __name__ == "__main__":
    raise SystemExit(main())

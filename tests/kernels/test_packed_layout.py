"""Files keep packed matrices: whoever changes how these lie raises ``kPackedLayoutVersion``."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from edgeh2o import _core
from edgeh2o.formats.gguf_types import TENSOR_TYPES
from edgeh2o.runners.native import NativeModelFile, core_config
from tests.tiny_models import TinyModelFactory

ROWS, COLS = 19, 512
# Columns of a panel, and whether 8-bit quants are signed: those of all instruction sets.
LAYOUTS = [(8, False), (16, False), (16, True), (8, True), (1, False)]
VERSION = 1
# Of each type, the hash of a matrix in all layouts.
GOLDEN: dict[str, str] = {}
BLOCKS = {item.name: item for item in TENSOR_TYPES.values()}


def _data(name: str) -> bytes:
    """Any bits, the same on every machine."""
    item = BLOCKS[name]
    n_bytes = ROWS * COLS // item.block_size * item.block_bytes
    pieces = (blake2b(f"{name} {i}".encode()).digest() for i in range(-(-n_bytes // 64)))
    return b"".join(pieces)[:n_bytes]


def test_the_version_is_that_of_the_hashes(tiny_model: TinyModelFactory) -> None:
    with NativeModelFile(tiny_model()) as file:
        model = _core.Model(core_config(file.config))
    assert _core.packed_layout(model)[0] == VERSION


def test_every_type_has_a_hash() -> None:
    assert sorted(GOLDEN) == sorted({*_core.supported_types(), *_core.widened_types()})


@pytest.mark.parametrize("name", sorted({*_core.supported_types(), *_core.widened_types()}))
def test_packed_bytes_are_those_of_the_version(name: str) -> None:
    """A matrix that lies otherwise needs a higher version, and then new hashes here."""
    digest = blake2b(digest_size=8)
    for panel_cols, is_signed in LAYOUTS:
        digest.update(_core.pack_matrix(_data(name), name, ROWS, COLS, panel_cols, is_signed))
    assert digest.hexdigest() == GOLDEN[name]

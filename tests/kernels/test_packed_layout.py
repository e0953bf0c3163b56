"""Files keep packed matrices: whoever changes how these lie raises ``kPackedLayoutVersion``."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from edgeh2o import _core
from edgeh2o.formats.gguf_types import TENSOR_TYPES
from edgeh2o.runners.core_config import core_config
from edgeh2o.runners.native import NativeModelFile
from tests.tiny_models import TinyModelFactory

ROWS, COLS = 19, 512
# Columns of a panel, and whether 8-bit quants are signed: those of all instruction sets.
LAYOUTS = [(8, False), (16, False), (16, True), (8, True), (1, False)]
VERSION = 1
# Of each type, the hash of a matrix in all layouts.
GOLDEN = {
    "BF16": "c689aa5634066953",
    "F16": "b23e6adcc66d757c",
    "F32": "7128d12ec62df436",
    "IQ1_M": "db216b17fe350884",
    "IQ1_S": "7142bf5cfd6d0310",
    "IQ2_S": "84c2273b31a489e9",
    "IQ2_XS": "374c47a23295c60f",
    "IQ2_XXS": "92ed94ce0123fb9c",
    "IQ3_S": "36d5327bc75992e1",
    "IQ3_XXS": "9736316561fc670e",
    "IQ4_NL": "b9830b8b618c4016",
    "IQ4_XS": "b27bc3e991bbe2f0",
    "MXFP4": "d6534d279a4459f8",
    "NVFP4": "34b199230eac3ea6",
    "Q1_0": "5c6a834456d7801c",
    "Q2_0": "fc977d0109937452",
    "Q2_K": "2ea48d81864845ee",
    "Q3_K": "ed0a4149913d6398",
    "Q4_0": "bc24707965726ffb",
    "Q4_1": "9e696249ef0085f5",
    "Q4_K": "b791594210b29e05",
    "Q5_0": "4e50aa2604b73825",
    "Q5_1": "ee030ef820f34c4d",
    "Q5_K": "f19c266889424802",
    "Q6_K": "709d5237ef14813b",
    "Q8_0": "66df5d493fef5811",
    "TQ1_0": "771ae0e2849d9d92",
    "TQ2_0": "549d72335b9de60c",
}
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

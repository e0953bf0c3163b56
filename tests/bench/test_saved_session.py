"""Token ids of a saved llama.cpp session."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bench.errors import LlamaCppError
from bench.saved_session import read_saved_tokens

# The first bytes of a session that llama-completion saved after a prompt of 8 tokens and -n 3.
RECORDED = bytes.fromhex(
    "6e736767 0a000000 0a000000 644c0000 89030000 1c000000 04010000 f70d0000"
    "1a010000 29120000 3a010000 df0e0000 19010000 05000000 6c6c616d61"
)


def test_ids_end_where_the_state_begins(tmp_path: Path) -> None:
    path = tmp_path / "session.bin"
    path.write_bytes(RECORDED)
    prompt, answer = [19556, 905, 28, 260, 3575, 282, 4649, 314], [3807, 281]
    assert read_saved_tokens(path) == prompt + answer


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (RECORDED[:11], "too short"),
        (RECORDED[:20], "ends before its 10 tokens"),
        (b"GGUF" + RECORDED[4:], "no llama.cpp session"),
        (RECORDED[:8] + struct.pack("<I", 2**31) + RECORDED[12:], "ends before its 2147483648"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "session.bin"
    path.write_bytes(data)
    with pytest.raises(LlamaCppError, match=message):
        read_saved_tokens(path)

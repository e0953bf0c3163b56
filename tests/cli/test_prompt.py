"""Where prompts come from, and that they arrive unchanged."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import pytest

from edgeh2o.cli.prompt import add_prompt_options, read_prompt


def _read(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    add_prompt_options(parser)
    return read_prompt(parser.parse_args(arguments))


@pytest.mark.parametrize("text", ["hello\n", "", "a\0b", "na\u00efve \U0001f600", "-"])
def test_text_is_taken_as_it_is(text: str) -> None:
    assert _read("-p", text) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"one\n", "one"),
        (b"one\n\n", "one\n"),
        (b"one\r\n", "one\r"),
        (b"a\0b \xc3\xa9", "a\0b \u00e9"),
        (b"", ""),
        (b"\n", ""),
    ],
)
def test_file_and_stdin_lose_one_newline(
    data: bytes, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    assert _read("-f", str(path)) == text
    for arguments in (["-"], ["-f", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        assert _read(*arguments) == text

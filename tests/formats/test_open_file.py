"""Reads of files of weights, by systems that read less at a time than they are asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edgeh2o import FormatError
from edgeh2o.formats import open_file


def test_no_call_reads_more_than_macos_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a call of 2 GiB is an error of the system, not a read of less."""
    path, read = tmp_path / "file", os.pread
    path.write_bytes(b"0123456789")

    def read_few(descriptor: int, n_bytes: int, offset: int) -> bytes:
        if n_bytes > 4:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(descriptor, n_bytes, offset)

    monkeypatch.setattr(os, "pread", read_few)
    monkeypatch.setattr(open_file, "MAX_READ_BYTES", 4)
    with path.open("rb") as file:
        assert open_file.read_at(path, file.fileno(), 1, 9) == b"123456789"
        with pytest.raises(FormatError):
            open_file.read_at(path, file.fileno(), 1, 10)


def test_the_bound_is_below_that_of_macos() -> None:
    assert open_file.MAX_READ_BYTES < 2**31

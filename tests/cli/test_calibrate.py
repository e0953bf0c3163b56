"""``edgeh2o calibrate``: what is refused before the work of minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from tests.cli.conftest import ExpectUsageError


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["-o", "{folder}"], "cannot be written; name another file after -o"),
        (["-o", "/dev/null/table.json"], "cannot be written"),
        (["--text", "{folder}"], "is a directory; give a text file to --text"),
        (["--text", "none.txt"], "check --text"),
    ],
)
def test_files_that_cannot_be(
    tmp_path: Path, expect_usage_error: ExpectUsageError, options: list[str], part: str
) -> None:
    options = [option.format(folder=tmp_path) for option in options]
    expect_usage_error(main(["calibrate", "missing.gguf", *options]), part)

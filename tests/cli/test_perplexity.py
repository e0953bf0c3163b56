"""``edgeh2o perplexity`` on a tiny model: its three formats and its errors."""

from __future__ import annotations

import csv
import io
import json

import pytest

from edgeh2o.cli.main import main
from tests.cli.conftest import ExpectUsageError

SIZES = ["--ctx", "96", "--windows", "2", "--skip", "16", "-b", "32", "-ub", "16"]
ATTENTION = ["--h2o-local", "4", "--h2o-heavy", "4"]


def _run(model: str, text: str, *options: str) -> int:
    return main(["perplexity", model, "-f", text, *SIZES, *ATTENTION, *options])


def test_text_has_a_row_per_range(
    model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(model, text) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].endswith(": 2 windows of 96 tokens")
    assert lines[1].startswith("h2o local 4 heavy 4 ")
    assert ", chunks of 16: " in lines[1]
    ranges = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert ranges == ["tokens", "-" * 11, "all", "after 16", "second half"]


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        (["-b", "96", "-ub", "96"], True),
        (["-b", "96", "-ub", "48"], False),
    ],
)
def test_windows_of_one_chunk_are_told(
    model: str, text: str, capsys: pytest.CaptureFixture[str], options: list[str], is_told: bool
) -> None:
    """The table said that nothing was lost, and nothing had been left out."""
    words = ["perplexity", model, "-f", text, "--ctx", "96", "--windows", "1", *ATTENTION]
    assert main([*words, *options]) == 0
    warning = "a window of 96 tokens is one chunk (-ub 96), which reads all of itself"
    assert (warning in capsys.readouterr().err) == is_told


def test_csv_and_json_agree(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(model, text, "-o", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert _run(model, text, "-o", "json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["attention"].items() >= {"algorithm": "h2o", "local": 4, "heavy": 4}.items()
    assert (report["context"], report["n_windows"], len(report["windows"])) == (96, 2, 2)
    for row, quality in zip(rows, report["ranges"], strict=True):
        assert row["range"] == quality["range"]
        for name in ("loss_percent", "loss_percent_error", "kl", "top1_percent"):
            assert float(row[name]) == quality[name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--windows", "99"], "too few for 99 windows of 96"),
        (["--windows", "0"], "number of windows must be at least 1"),
        (["--ctx", "2"], "at least 3 tokens"),
        (["--skip", "-1"], "skip must be at least 0"),
        (["-f", "/nonexistent/text"], "cannot read the text file /nonexistent/text"),
        (["-f", "/"], "is a directory"),
        (["-o", "xml"], "invalid choice"),
    ],
)
def test_errors_are_one_line(
    model: str, text: str, options: list[str], message: str, expect_usage_error: ExpectUsageError
) -> None:
    expect_usage_error(_run(model, text, *options), message)

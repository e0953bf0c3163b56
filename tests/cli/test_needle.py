"""``edgeh2o needle`` on a tiny model: formats, the picture, errors before any work."""

from __future__ import annotations

import csv
import io
import json
from importlib import util
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from edgeh2o.evaluation import figures
from tests.cli.conftest import ExpectUsageError
from tests.evaluation.pictures import png_size

SIZES = ["--lengths", "300", "--depths", "0.2,0.8", "--places", "start,end"]
CHUNKS = ["-b", "64", "-ub", "32", "--h2o-local", "4", "--h2o-heavy", "4"]


def _run(model: str, *options: str) -> int:
    return main(["needle", model, *SIZES, *CHUNKS, *options])


def test_every_format_has_every_prompt(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(model, "-o", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["depth"], row["place"]) for row in rows] == [
        ("0.2", "start"),
        ("0.2", "end"),
        ("0.8", "start"),
        ("0.8", "end"),
    ]
    assert _run(model, "-o", "json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [str(result["sparse_logprob"]) for result in report["results"]] == [
        row["sparse_logprob"] for row in rows
    ]
    assert report["summary"]["prompts"] == 4
    assert _run(model) == 0
    table = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [[cell.strip() for cell in row] for row in table[2:]] == [
        ["300", "0.2", "2"],
        ["300", "0.8", "2"],
        ["all", "", "4"],
    ]


def test_the_plot_is_a_png(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "needle.png"
    assert _run(model, "--plot", str(path)) == 0
    assert capsys.readouterr().err == ""
    width, height = png_size(path)
    assert width > height > 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--depths", "0.5,2"], "between 0 and 1, got 2.0"),
        (["--depths", "half"], "expected values between commas"),
        (["--places", "top"], "places are start, middle, end"),
        (["--lengths", ""], "at least one length"),
        (["--lengths", "20"], "has no room for the needle"),
        (["--plot", "needle.pdf"], "pictures are PNG files"),
        (["--plot", "/nonexistent/needle.png"], "there is no folder /nonexistent"),
    ],
)
def test_wrong_usage_is_one_line(
    model: str, options: list[str], message: str, expect_usage_error: ExpectUsageError
) -> None:
    expect_usage_error(_run(model, *options), message)


def test_a_missing_matplotlib_is_found_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = util.find_spec
    monkeypatch.setattr(
        figures, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    path = tmp_path / "needle.png"
    assert main(["needle", str(tmp_path / "missing.gguf"), "--plot", str(path)]) == 1
    assert capsys.readouterr().err == (
        "edgeh2o: error: pictures need matplotlib: pip install 'edgeh2o[plot]'\n"
    )

"""``edgeh2o evaluate`` on a tiny model: its formats and its errors."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from tests.cli.conftest import ExpectUsageError
from tests.evaluation.pictures import png_size

SIZES = ["--ctx", "300", "-b", "64", "-ub", "32", "--h2o-local", "8", "--h2o-heavy", "8"]


def test_formats_agree(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", model, *SIZES, "--kinds", "facts,copied-prose", "--text-seeds", "3"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1 window of 300 tokens of each kind" in lines[0]
    assert lines[1].startswith("h2o local 8 heavy 8 ")
    assert main([*command, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["context"], report["seeds"]) == (300, [3])
    assert main([*command, "-o", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["kind"] for row in rows] == ["facts", "copied-prose"]
    assert [float(row["kl"]) for row in rows] == [kind["kl"] for kind in report["kinds"]]


def test_tasks_and_their_picture(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "tasks.png"
    sizes = ["--ctx", "500", *SIZES[2:]]
    command = ["evaluate", model, *sizes, "--suite", "long", "--tasks", "needles-4,copy"]
    assert main([*command, "--text-seeds", "1", "--plot", str(plot), "-o", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert (rows[0]["task"], rows[0]["questions"]) == ("needles-4", "4")
    assert [row["task"] for row in rows] == ["needles-4", "copy"]
    assert png_size(plot)[0] > 300


def test_one_question_has_no_error(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ctx", "500", *SIZES[2:], "--suite", "long", "--tasks", "copy"]
    command = ["evaluate", model, *sizes, "--text-seeds", "1", "--questions", "1"]
    assert main([*command, "-o", "json"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (task["questions"], task["difference_error"]) == (1, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "json"], "--tasks belongs to --suite long"),
        (["--plot", "x.png"], "--plot belongs to --suite long"),
        (["--suite", "long", "--kinds", "prose"], "--kinds belongs to --suite texts"),
        (["--suite", "long", "--tasks", "poems"], "no task 'poems'"),
        (["--kinds", "poems"], "no texts of kind 'poems'"),
        (["--text-seeds", "one"], "values between commas"),
        (["--ctx", "100"], "at least 256 tokens"),
        (["--decode", "0"], "the tokens to decode (--decode) must be at least 4"),
        (["--decode", "300"], "less than the 300 of a window"),
        (["--decode", "64"], "this attention decodes densely"),
        (["--suite", "long", "--decode", "64"], "--decode belongs to --suite texts"),
    ],
)
def test_bad_options(
    model: str, expect_usage_error: ExpectUsageError, options: list[str], message: str
) -> None:
    expect_usage_error(main(["evaluate", model, *SIZES, *options]), message)

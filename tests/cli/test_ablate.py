"""``edgeh2o ablate`` on a tiny model: its files, its grids, its errors before any work."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from edgeh2o import H2OConfig, UsageError
from edgeh2o.cli.ablate import parse_grid
from edgeh2o.cli.main import main
from edgeh2o.cli.options import parse_value
from tests.cli.conftest import ExpectUsageError
from tests.evaluation.pictures import png_size

SIZES = ["--ctx", "96", "--skip", "16", "-b", "32", "-ub", "16"]
ATTENTION = ["--h2o-local", "4", "--h2o-heavy", "4"]


def _run(model: str, text: str, folder: Path, *options: str) -> int:
    paths = ["-f", text, "--folder", str(folder / "results")]
    return main(["ablate", model, *paths, *SIZES, *ATTENTION, *options])


def test_writes_the_table_and_the_picture(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--grid", "heavy=2,6", "--grid", "chunk-size=16, 32"]
    assert _run(model, text, tmp_path, *grid, "-o", "csv") == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "edgeh2o: warning: --grid heavy takes the place of --h2o-heavy 4\n"
        "edgeh2o: warning: --grid chunk_size takes the place of --chunk-size 16\n"
    )
    table = (tmp_path / "results" / "perplexity_ablation.csv").read_text()
    assert table == captured.out
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [(row["heavy"], row["chunk_size"]) for row in rows] == [
        ("2", "16"),
        ("2", "32"),
        ("6", "16"),
        ("6", "32"),
    ]
    assert min(png_size(tmp_path / "results" / "perplexity_ablation.png")) > 300


def test_no_plot_writes_the_table_alone(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(model, text, tmp_path, "--grid", "local=2", "--no-plot", "-o", "json") == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["perplexity_ablation.csv"]
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["values"] == {"local": 2}


def test_grid_values_get_the_type_of_the_field() -> None:
    grid = parse_grid(["local=1,2", "chunk_size=16", "unknown=x"], H2OConfig())
    assert grid == {"local": (1, 2), "chunk_size": (16,), "unknown": ("x",)}
    with pytest.raises(UsageError, match="local takes values of type int"):
        parse_grid(["local=1,x"], H2OConfig())


@pytest.mark.parametrize(
    ("type_name", "text", "value"),
    [("int", "3", 3), ("float", "0.5", 0.5), ("str", "mean", "mean"), ("bool", "true", True)],
)
def test_values_are_parsed_by_type(type_name: str, text: str, value: object) -> None:
    assert parse_value(type_name, text) == value


@pytest.mark.parametrize(
    ("type_name", "text"), [("int", "0.5"), ("float", "x"), ("bool", "1"), ("tuple[str, ...]", "a")]
)
def test_values_of_another_type_are_refused(type_name: str, text: str) -> None:
    with pytest.raises(ValueError):
        parse_value(type_name, text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "required: --grid"),
        (["--grid", "heavy"], "--grid takes FIELD=V1,V2"),
        (["--grid", "heavy=1", "--grid", "heavy=2"], "gives heavy twice"),
        (["--grid", "heavy=x"], "heavy takes values of type int"),
        (["--grid", "heavy="], "no value for heavy"),
        (["--grid", "page=1"], "h2o has no setting 'page'"),
        (["--grid", "sinks=1", "--windows", "99"], "too few for 99 windows"),
        (["--grid", "heavy=1", "--folder", "/dev/null/x"], "there is no folder /dev/null"),
    ],
)
def test_wrong_usage_is_one_line(
    model: str,
    text: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    expect_usage_error: ExpectUsageError,
) -> None:
    expect_usage_error(_run(model, text, tmp_path, *options), message)

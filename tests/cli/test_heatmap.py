"""``edgeh2o heatmap`` on a tiny model: its files, its summary, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from tests.cli.conftest import ExpectUsageError

SIZES = ["--ctx", "96", "-b", "32", "-ub", "16", "--h2o-local", "4", "--h2o-heavy", "4"]


def _run(model: str, text: str, folder: Path, *options: str) -> int:
    paths = ["-f", text, "--folder", str(folder / "maps")]
    return main(["heatmap", model, *paths, *SIZES, *options])


def test_pictures_in_the_folder_and_the_summary_on_stdout(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(model, text, tmp_path, "--layers", "0,2", "-o", "json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    report = json.loads(captured.out)
    assert report == json.loads((tmp_path / "maps" / "summary.json").read_text())
    assert (report["context"], report["chunk_size"], len(report["heads"])) == (96, 16, 6)
    layers = sorted(path.name for path in (tmp_path / "maps").glob("layer_*.png"))
    assert layers == ["layer_00.png", "layer_02.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "7"], "there is no layer 7"),
        (["--ctx", "16"], "one chunk of 16"),
        (["--folder", "/dev/null/maps"], "there is no folder /dev/null"),
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

"""``edgeh2o bench`` on a tiny model: formats, lists, pictures, errors before any work."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from edgeh2o import __version__
from edgeh2o.cli.main import main
from tests.cli.conftest import ExpectUsageError
from tests.evaluation.pictures import png_size

SIZES = ["-p", "32,80", "-n", "3", "-r", "2", "-b", "32", "-ub", "16"]
ATTENTION = ["--h2o-local", "4", "--h2o-heavy", "4"]
LLAMA_BENCH = "n_threads,flash_attn,n_prompt,n_gen,avg_ts\n2,0,64,0,100\n"


def _run(model: str, *options: str) -> int:
    return main(["bench", model, *SIZES, *ATTENTION, *options])


def test_a_row_per_threads_test_and_mode(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(model, "-o", "csv", "-t", "1,2", "-d", "0,20") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    tests = ["pp32", "pp80", "tg3", "tg3 @ d20"]
    assert [(row["threads"], row["test"], row["mode"]) for row in rows] == [
        (threads, test, mode)
        for threads in ("1", "2")
        for test in tests
        for mode in ("dense", "sparse")
    ]
    for row in rows:
        assert 0 < float(row["low_tps"]) <= float(row["median_tps"]) <= float(row["high_tps"])


def test_json_lines_and_json_hold_every_sample(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--modes", "sparse", "--no-warmup", "--cache-type", "f32"]
    assert _run(model, "-o", "jsonl", *options) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["test"] for record in records] == ["pp32", "pp80", "tg3"]
    assert _run(model, "-o", "json", *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["cores"] >= 1
    for record in (*records, *report["results"]):
        assert len(record["samples_tps"]) == 2
        assert record["cache_type"] == "f32"
        assert set(record["memory_bytes"]) > {"weights", "kv_cache", "activations"}


def test_the_table_is_the_default(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(model) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f" cores, edgeh2o {__version__}")
    assert [line.split("|")[5].strip() for line in lines[4:]] == ["pp32"] * 2 + ["pp80"] * 2 + [
        "tg3"
    ] * 2


def test_plot_draws_both_pictures(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = tmp_path / "llama.csv"
    peer.write_text(LLAMA_BENCH)
    folder = tmp_path / "new" / "pictures"
    assert _run(model, "--plot", str(folder), "--llama-bench", str(peer)) == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in folder.iterdir()) == [
        "memory_profile.png",
        "throughput_comparison.png",
    ]
    assert all(min(png_size(path)) > 300 for path in folder.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "x"], "expected values between commas"),
        (["-p", "-1"], "at least 0, got -1"),
        (["-r", "0"], "repetitions must be at least 1"),
        (["-t", "0"], "threads (--threads) must be an integer from 1"),
        (["--modes", "fast"], "modes are dense and sparse"),
        (["--plot", "{folder}", "-p", "0"], "give prompt lengths"),
        (["--plot", "{file}"], "there is no folder"),
        (["--llama-bench", "{file}"], "give --plot FOLDER"),
        (["--llama-bench", "/nonexistent.csv"], "cannot read /nonexistent.csv"),
    ],
)
def test_wrong_usage_is_one_line(
    model: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    expect_usage_error: ExpectUsageError,
) -> None:
    file = tmp_path / "llama.csv"
    file.write_text(LLAMA_BENCH)
    names = {"{folder}": str(tmp_path), "{file}": str(file)}
    expect_usage_error(_run(model, *(names.get(option, option) for option in options)), message)

"""``edgeh2o calibrate``: what it writes, and what is refused before the work of minutes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from edgeh2o import LLM, _core
from edgeh2o.attention.budget_table import read_table
from edgeh2o.attention.decode_quality import DecodeQuality
from edgeh2o.attention.head_budgets import UNKNOWN
from edgeh2o.attention.prefill_quality import PrefillQuality
from edgeh2o.cli import calibrate as cli_calibrate
from edgeh2o.cli import progress
from edgeh2o.cli.main import main
from edgeh2o.evaluation import (
    calibration,
    decode_calibration,
    text_calibration,
)
from edgeh2o.evaluation.text_calibration import TextMeter
from tests.budget_tables import calibrate_by_few_windows, harmless_table
from tests.cli.conftest import ExpectUsageError
from tests.tiny_models import TinyModelFactory


@pytest.fixture
def model(tiny_model: TinyModelFactory) -> str:
    """Of two layers: a table is measured in two thirds of the time."""
    return str(tiny_model(tensor_type="Q4_0", n_layers=2))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the thing is that the art is there and the hen is in the pen " * 120)
    return str(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate_by_few_windows(monkeypatch)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["-o", "{folder}"], "cannot be written: it is a folder"),
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


def test_it_writes_over_nothing_but_a_table(
    tmp_path: Path, model: str, text: str, expect_usage_error: ExpectUsageError
) -> None:
    other, out = tmp_path / "other.gguf", tmp_path / "table.json"
    other.write_bytes(Path(model).read_bytes())
    expect_usage_error(main(["calibrate", str(other), "-o", str(other)]), "is no budget table")
    assert other.read_bytes() == Path(model).read_bytes()
    out.touch()
    for _ in range(2):
        options = ["--text", text, "--length", "2048", "-o", str(out), "--quiet"]
        assert main(["calibrate", model, *options]) == 0


def test_a_run_takes_the_table(
    model: str,
    tmp_path: Path,
    text: str,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whether heads of random weights lose too much depends on every rounding.
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "f32")
    options = ["--text", text, "--length", "2048"]
    given = tmp_path / "new" / "table.json"
    assert main(["calibrate", model, *options, "-o", str(given)]) == 0
    *losses, path = capsys.readouterr().out.splitlines()
    assert path == str(given)
    line = losses.pop()
    (measured,) = json.loads(given.read_text())["prefill"]
    assert line.startswith(f"--budget {measured['budget']:<5} prompts of up to 2,048 tokens lose")
    assert f"{max(measured['loss'].values()):+.2f} +- " in line and "guarded at " in line
    if "int8" in _core.attention_precisions():
        line = losses.pop()
        assert line.startswith("int8 ") and "perplexity loss" in line and "text 1" in line
        assert json.loads(given.read_text())["rounding"]["length"] == 2048
    assert all(line.startswith("--budget ") and line.endswith(" %") for line in losses)

    def source(*flags: str) -> str:
        assert main(["run", model, "-p", "the", "-n", "1", "--json", *flags]) == 0
        table: str = json.loads(capsys.readouterr().out)["attention"]["table"]
        return table

    assert source() == UNKNOWN
    # Heads of random weights lose what they lose: the budget is given.
    assert source("--budget-table", str(given), "--budget", "600") == "file"
    assert main(["calibrate", model, *options, "--quiet"]) == 0
    assert Path(capsys.readouterr().out.strip()).parent == cache
    assert source("--budget", "600") == "cache"


@pytest.mark.usefixtures("cache")
def test_it_makes_a_table_anew_that_cannot_be_used(
    model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["calibrate", model, "--text", text, "--length", "2048", "--quiet"]
    assert main(command) == 0
    table = Path(capsys.readouterr().out.strip())
    made = table.read_text()
    table.write_text("damaged")
    assert main(["run", model, "-p", "the", "-n", "1"]) == 1
    assert "make it again with `edgeh2o calibrate`" in capsys.readouterr().err
    assert main(command) == 0
    assert table.read_text() == made


def test_it_has_no_flags_of_an_attention(model: str, expect_usage_error: ExpectUsageError) -> None:
    expect_usage_error(main(["calibrate", model, "--headwise-local", "8"]), "unrecognized")


def test_an_interrupted_one_goes_on(
    model: str,
    text: str,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["calibrate", model, "--text", text, "--length", "2048", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "find_prefill", Mock(side_effect=KeyboardInterrupt))
        assert main(command) == 130
    (notes,) = cache.iterdir()
    assert notes.name.endswith(".calibration.json")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(text_calibration, "measure_head_errors", Mock(side_effect=AssertionError))
        assert main(command) == 0
    assert list(cache.iterdir()) == [Path(capsys.readouterr().out.strip())]


@pytest.mark.usefixtures("cache")
def test_decode_is_measured(
    model: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_calibration, "_BUDGETS", (1024,))
    command = ["calibrate", model, "--text", text, "--length", "2400"]
    for losses, flags, way in (
        ({512: 0.2, 768: 0.1}, [], "by default"),
        ({512: 0.7}, ["--decode"], "not measured"),
    ):
        monkeypatch.setattr(TextMeter, "measure_losses", lambda *_, losses=losses: losses)
        assert main([*command, *flags]) == 0
        *_, line, path = capsys.readouterr().out.splitlines()
        assert way in line
        measured = json.loads(Path(path).read_text()).get("decode")
        if way == "by default":
            assert (measured["budget"], measured["length"]) == (1024, 2400)
            assert "prefill" in json.loads(Path(path).read_text())
            assert f"--budget 1024  decode KL up to {1e3 * measured['kl']['pairs']:.1f}e-3" in line
            harmless = "headwise by default after prompts of up to 2,400 tokens"
            assert line.endswith(
                harmless if measured["kl"]["pairs"] <= 6e-3 else "dense by default"
            )
        else:
            assert measured is None


def test_heads_that_read_everything_are_counted(tiny_model: TinyModelFactory) -> None:
    with LLM(tiny_model(tensor_type="F32")) as llm:
        table = harmless_table(llm.config, 64)
    decode = DecodeQuality(budget=2048, length=8192, kl={"pairs": 0.0051, "code": 0.001})
    assert cli_calibrate._describe_decode(
        replace(table, decode=replace(decode, heads=(2048, None, 2048))), is_asked_for=None
    ) == (
        "2,048 keys     decode KL up to 5.1e-3 (pairs), 1 of 3 KV heads read everything: headwise "
        "by default after prompts of up to 8,192 tokens"
    )
    line = cli_calibrate._describe_decode(replace(table, decode=decode), is_asked_for=None)
    assert line.startswith("--budget 2048  decode KL up to 5.1e-3 (pairs): headwise")


@pytest.mark.usefixtures("cache")
def test_a_line_for_every_length(
    model: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = PrefillQuality(
        budget=512, length=2048, loss={"pairs": 0.2}, loss_error={"pairs": 0.1}, kl={"pairs": 2e-3}
    )
    measured = (short, replace(short, budget=1152, length=4096))
    monkeypatch.setattr(calibration, "find_prefill", lambda *_, **__: measured)
    assert main(["calibrate", model, "--text", text, "--length", "2048"]) == 0
    *_, first, second, path = capsys.readouterr().out.splitlines()
    rest = (
        "lose up to +0.20 +- 0.10 % (pairs), KL up to 2.0e-3 (pairs): guarded at 4.5 % by default"
    )
    assert first == f"--budget 512   prompts of up to 2,048 tokens {rest}"
    assert second == f"1,152 keys     prompts of up to 4,096 tokens {rest}"
    assert read_table(Path(path)).prefill == measured


def test_progress_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are no tokens, and it may find that it needs fewer."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    bars = progress.ProgressBars(is_shown=True)
    for done, total in ((0, 200), (1, 200), (30, 40)):
        bars("calibrate", done, total)
    bars.close()
    err = capsys.readouterr().err
    assert "Calibrating" in err and "75%" in err and "tokens/s" not in err


@pytest.mark.parametrize(
    ("seconds", "text"), [(1, "1 min"), (100, "2 min"), (7100, "118 min"), (9000, "2.5 h")]
)
def test_what_is_left_is_told_roughly(seconds: float, text: str) -> None:
    assert progress.format_minutes(seconds) == text


def test_progress_where_stderr_is_no_terminal(
    model: str,
    tmp_path: Path,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["calibrate", model, "--text", text, "--length", "2048"]
    command += ["-o", str(tmp_path / "table.json")]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    seconds = count(step=4)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    assert main(command) == 0
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if "Calibrating" in line]
    shares = [int(line.split()[1].rstrip(",").removesuffix("%")) for line in lines]
    assert len(shares) > 1 and sorted(set(shares)) == shares
    assert all(line.endswith(" min left") for line in lines)
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().err == ""

"""Files that cannot be written: found before the model is read, or else no result is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from edgeh2o.cli.main import main
from edgeh2o.formats import atomic_file
from tests.budget_tables import calibrate_by_few_windows

CHUNKS = ["-b", "32", "-ub", "16", "--h2o-local", "4", "--h2o-heavy", "4"]
WINDOW = ["-f", "{text}", "--ctx", "96"]
# Each verb, its flag, and the files that it writes below what the flag names.
VERBS = [
    (["needle", "--lengths", "300", "--depths", "0.5"], "--plot", ["a.png"]),
    (["bench", "-p", "32", "-n", "0"], "--plot", ["throughput_comparison.png"]),
    (["bench", "-p", "32", "-n", "0"], "--plot", ["memory_profile.png"]),
    (["ablate", *WINDOW, "--grid", "heavy=2"], "--folder", ["perplexity_ablation.csv"]),
    (["ablate", *WINDOW, "--grid", "heavy=2"], "--folder", ["perplexity_ablation.png"]),
    (["heatmap", *WINDOW], "--folder", ["summary.csv"]),
    (["heatmap", *WINDOW], "--folder", ["sinks.png"]),
    (["run", "-p", "the art", "-n", "2", "--ignore-eos"], "--memory-profile", ["a.csv"]),
    (["run", "-p", "the art", "-n", "2", "--ignore-eos"], "--memory-profile", ["a.csv", "a.png"]),
    (["calibrate", "--text", "{text}", "--length", "2048"], "-o", ["table.json"]),
]
NAMES = [f"{words[0]} {files[-1]}" for words, _, files in VERBS]


def _command(model: str, text: str, words: list[str], flag: str, files: list[str]) -> list[str]:
    """The command line up to the folder or the first of the files that ``flag`` is to name."""
    chunks = [] if words[0] == "calibrate" else CHUNKS
    return [words[0], model, *(word.format(text=text) for word in words[1:]), *chunks, flag]


def _named(folder: Path, words: list[str], files: list[str]) -> str:
    return str(folder if words[0] in ("bench", "ablate", "heatmap") else folder / files[0])


@pytest.mark.parametrize(("words", "flag", "files"), VERBS, ids=NAMES)
def test_a_place_that_cannot_be_written_is_found_before_the_model_is_read(
    text: str,
    words: list[str],
    flag: str,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = _command("missing.gguf", text, words, flag, files)
    assert main([*command, _named(Path("/dev/null/x"), words, files)]) == 2
    assert f"{flag} /dev/null/x" in (stderr := capsys.readouterr().err)
    assert "there is no folder /dev/null" in stderr and "missing.gguf" not in stderr

    def write_nothing(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file, "_create_locked", write_nothing)
    assert main([*command, _named(tmp_path, words, files)]) == 1
    assert f"{flag} {tmp_path}" in (stderr := capsys.readouterr().err)
    assert "cannot be written: No space left on device" in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize(("words", "flag", "files"), VERBS, ids=NAMES)
def test_results_are_printed_though_a_file_cannot_be_written(
    model: str,
    tmp_path: Path,
    words: list[str],
    flag: str,
    files: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibrate_by_few_windows(monkeypatch)
    text, folder = tmp_path / "text.txt", tmp_path / "new"
    text.write_text("the thing is that the art is there and the hen is in the pen " * 120)
    folder.mkdir()
    (folder / files[-1]).symlink_to("/dev/full")
    command = _command(model, str(text), words, flag, files)
    assert main([*command, _named(folder, words, files)]) == 1
    captured = capsys.readouterr()
    if words[0] == "run":  # what random weights answer may be white space
        assert captured.out.endswith("\n") and "tokens/s" in captured.err
    else:
        assert captured.out.strip()
    error = captured.err.splitlines()[-1]
    assert error.startswith("edgeh2o: error: cannot write ")
    assert f"{files[-1]}: No space left on device" in error
    assert not list(folder.glob(".edgeh2o*"))

"""Verbs on the host device give what they give on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeh2o.cli.main import main
from tests.cuda.host_library import SMALL
from tests.tiny_models import TinyModelFactory

pytestmark = pytest.mark.usefixtures("host_device")
H2O = ["--attention", "h2o", "--h2o-local", "4", "--h2o-heavy", "4", "-b", "32", "-ub", "16"]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> str:
    return str(tiny_model(**SMALL))


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    values: dict[str, Any] = json.loads(captured.out)
    return values


def test_perplexity(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("the cat was on the mat and the dog is in the house that he has built " * 9)
    sizes = ["--ctx", "64", "--windows", "2", "--skip", "16", "-o", "json"]
    command = ["perplexity", model, "-f", str(text), *sizes, *H2O, "--attention-precision", "f32"]
    on_cpu, on_device = (report(capsys, *command, "--device", device) for device in ("cpu", "cuda"))
    for ours, theirs in zip(on_device["ranges"], on_cpu["ranges"], strict=True):
        assert ours["range"] == theirs["range"]
        assert ours["loss_percent"] == pytest.approx(theirs["loss_percent"], abs=0.05)
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=0.02, abs=1e-5)


@pytest.mark.parametrize("attention", [H2O, ["--attention", "dense", "-b", "32", "-ub", "16"]])
def test_a_session_goes_on_from_its_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], attention: list[str]
) -> None:
    """On the device that made it, and on the other."""
    words = ["--temp", "0", "--ignore-eos", "-n", "4", "--json", "--quiet", "-c", "128"]
    prompt = "the cat was on the mat and the dog"
    answers = []
    for first, second in (("cpu", "cpu"), ("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")):
        session = str(tmp_path / f"{first}-{second}")
        command = ["run", model, *words, *attention, "--session", session]
        report(capsys, *command, "-p", prompt, "--device", first)
        values = report(capsys, *command, "-p", prompt + " is in the house", "--device", second)
        assert values["cached_tokens"] > 0
        answers.append(values["text"])
    assert len(set(answers)) == 1

"""What can be refused without weights is refused while they are read, and ends that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from edgeh2o.cli.progress import ProgressBars
from edgeh2o.engine.session import Session
from edgeh2o.errors import UsageError
from edgeh2o.llm import LLM
from edgeh2o.runners.native import NativeModelFile
from edgeh2o.runners.weight_loading import WeightLoading
from edgeh2o.sampling_config import SamplingParams
from tests.tiny_models import TinyModelFactory

ONE_TOKEN = SamplingParams(max_tokens=1)


@pytest.fixture
def model(tiny_model: TinyModelFactory) -> str:
    return str(tiny_model(tensor_type="Q4_0"))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of the weights: "waited" for, or "left"; and the bytes that were reported."""
    seen: list[str] = []
    wait, leave = WeightLoading.wait, WeightLoading.__exit__

    def watch_wait(loading: WeightLoading, on_bytes: Callable[[int, int], None] | None) -> None:
        seen.append("waited")
        wait(loading, on_bytes)

    def watch_exit(loading: WeightLoading, *exception: object) -> None:
        leave(loading, *exception)
        seen.append("left")

    def report(bars: ProgressBars, stage: str, done: int, total: int) -> None:
        if done:
            seen.append(stage)

    monkeypatch.setattr(WeightLoading, "wait", watch_wait)
    monkeypatch.setattr(WeightLoading, "__exit__", watch_exit)
    monkeypatch.setattr(ProgressBars, "__call__", report)
    return seen


def _save_session(model: str, path: Path, **options: str) -> None:
    with LLM(model, **options) as llm:  # type: ignore[arg-type]
        llm.generate("the art", ONE_TOKEN, keep_cache=True)
        llm.save_session(path)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["-p", "the art of the thing", "-c", "2"], "and the context holds 2"),
        (["-p", "e " * 20_000], "trained on"),
        (["-p", "", "--chat", "--chat-template", "{broken}"], "template refuses these"),
        (["-p", "the", "--session", "{cache}"], 'with cache_type "q8_0"; this run has "f16"'),
        (["-p", "the", "--session", "{other}"], "with another model file"),
        (["-p", "the", "--session", "{h2o}", "--chat"], "with attention"),
    ],
)
def test_run_refuses_before_the_weights_are_there(
    model: str,
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    ends: list[str],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    cause: str,
) -> None:
    files = {name: tmp_path / name for name in ("cache", "other", "h2o", "broken")}
    _save_session(model, files["cache"], cache_type="q8_0")
    _save_session(str(tiny_model(tensor_type="Q4_0", seed=3)), files["other"])
    _save_session(model, files["h2o"], attention="h2o")
    files["broken"].write_text("{{ raise_exception('no') }}", encoding="utf-8")
    ends.clear()
    assert main(["run", model, *(text.format(**files) for text in arguments)]) != 0
    assert cause in capsys.readouterr().err
    assert ends == ["left"]


@pytest.mark.parametrize("template", [None, ""])
@pytest.mark.parametrize("verb", [["run", "-p", "the", "--chat"], ["chat"]])
def test_a_chat_without_a_template_ends_the_loading(
    model: str,
    ends: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: list[str],
    template: str | None,
) -> None:
    monkeypatch.setattr(NativeModelFile, "chat_template", template)
    assert main([*verb, "-m", model]) == 2
    assert "no chat template; give one with --chat-template, a file" in capsys.readouterr().err
    assert ends == ["left"]


def test_a_foreign_session_ends_the_loading_of_a_chat(
    model: str, tmp_path: Path, ends: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _save_session(model, tmp_path / "s", cache_type="q8_0")
    ends.clear()
    assert main(["chat", model, "--session", str(tmp_path / "s")]) == 2
    assert "cache_type" in capsys.readouterr().err
    assert ends == ["left"]


def test_a_good_prompt_waits_for_the_weights(
    model: str, ends: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", model, "-p", "the art", "-n", "1", "--quiet"]) == 0
    assert ends[:1] == ["waited"]
    assert "left" in ends


def test_a_session_cannot_answer_before_its_weights(model: str) -> None:
    def ask(session: Session) -> None:
        session.generate(lambda: session.prompts.open("the"), ONE_TOKEN)

    with pytest.raises(UsageError, match="closed, or not loaded yet"):
        LLM(model, check=ask)


def test_a_prompt_that_was_checked_is_tokenised_once(model: str) -> None:
    prompts = []

    def check(session: Session) -> None:
        session.check_prompt(lambda: session.prompts.open("the art"), SamplingParams(max_tokens=1))
        prompts.append(session.prompts.open("the art"))
        prompts.append(session.prompts.open("the art", parse_special=False))

    with LLM(model, check=check):
        first, other = prompts
        assert first is not other
        assert first.encode_from(0) is first.encode_from(0)

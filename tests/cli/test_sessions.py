"""Session files of ``run`` and ``chat``: what a user has read or said is not lost."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import LLM, PrefillConfig
from edgeh2o.cli.main import main
from edgeh2o.cli.progress import ProgressBars

PROMPT = "the thing is that the art is there"
SHORT = ["--temp", "0", "--ignore-eos", "-n", "5", "-ub", "16", "-b", "64", "--quiet"]


def _chat(model: str, monkeypatch: pytest.MonkeyPatch, lines: bytes, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    return main(["chat", model, *SHORT, *options])


def _cached_tokens(capsys: pytest.CaptureFixture[str]) -> int:
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return int(values["cached_tokens"])


def _saved_messages(model: str, path: Path) -> list[dict[str, str]]:
    with LLM(model, prefill=PrefillConfig(chunk_size=16, batch_size=64)) as llm:
        messages: list[dict[str, str]] = llm.load_session(path)["messages"]
    return messages


def test_an_empty_file_is_a_new_session(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As mktemp makes it."""
    path = tmp_path / "s"
    path.touch()
    command = ["run", model, *SHORT, "-p", PROMPT, "--json", "--session", str(path)]
    assert main(command) == 0
    assert _cached_tokens(capsys) == 0
    assert main(command) == 0
    assert _cached_tokens(capsys) > 0


def test_another_file_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    # Before a model is looked at.
    assert main(["run", "missing.gguf", *SHORT, "-p", PROMPT, "--session", str(path)]) == 1
    stderr = capsys.readouterr().err
    assert "it is not a session file; name another file with --session" in stderr
    assert "delete" not in stderr
    assert path.read_text() == "my notes"


def test_a_session_of_evicted_tokens_fails_after_the_answer(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    full = ["-c", "96", "--context-full", "evict", "--attention", "dense"]
    path = tmp_path / "s"
    command = ["run", model, *SHORT, *full, "-n", "120", "-p", PROMPT, "--session", str(path)]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "use --context-full shift, or a larger context (-c)" in captured.err
    assert not path.exists()


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_a_place_that_cannot_be_is_refused_before_the_model_is_read(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    prompt = ["-p", "x"] if verb == "run" else []
    assert main([verb, "missing.gguf", *prompt, "--session", "no/such/folder/s"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_run_does_not_overwrite_a_conversation(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    session = ["--session", str(tmp_path / "s")]
    assert _chat(model, monkeypatch, b"the art\n", *session) == 0
    saved = (tmp_path / "s").read_bytes()
    capsys.readouterr()
    assert main(["run", model, *SHORT, "-p", PROMPT, *session]) == 2
    assert "holds a conversation of 'edgeh2o chat', which would be lost" in capsys.readouterr().err
    assert main(["run", model, *SHORT, "-p", PROMPT, *session, "--session-read-only"]) == 0
    assert (tmp_path / "s").read_bytes() == saved


def test_a_chat_says_that_it_replaces_a_prompt(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    session = ["--session", str(tmp_path / "s")]
    assert main(["run", model, *SHORT, "-p", PROMPT, *session]) == 0
    for options, n_warnings in ((["--session-read-only"], 0), ([], 1), ([], 0)):
        capsys.readouterr()
        assert _chat(model, monkeypatch, b"the art\n", *session, *options) == 0
        assert capsys.readouterr().err.count("holds a prompt of 'edgeh2o run'") == n_warnings


def test_the_system_message_of_a_conversation_stays(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    session = ["--session", str(path)]
    assert _chat(model, monkeypatch, b"the art\n", *session, "--system", "in") == 0
    capsys.readouterr()
    assert _chat(model, monkeypatch, b"the hen\n", *session, "--system", "of") == 2
    assert "began with another --system; leave that out" in capsys.readouterr().err
    assert _chat(model, monkeypatch, b"/reset\nthe hen\n", *session) == 0
    texts = [message["content"] for message in _saved_messages(model, path)]
    assert texts[:2] == ["in", "the hen"]
    assert len(texts) == 3
    assert _chat(model, monkeypatch, b"the art\n", *session, "--system", "in") == 0


@pytest.mark.parametrize("lines", [b"the art\n/reset\n", b"/reset\n"])
def test_a_conversation_that_was_reset_is_not_in_the_file(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: bytes
) -> None:
    path = tmp_path / "s"
    session = ["--session", str(path)]
    assert _chat(model, monkeypatch, b"the hen is in the pen\n", *session) == 0
    assert b"the hen is in the pen" in path.read_bytes()
    assert _chat(model, monkeypatch, lines, *session) == 0
    assert b"the hen" not in path.read_bytes() and b"the art" not in path.read_bytes()
    with LLM(model, prefill=PrefillConfig(chunk_size=16, batch_size=64)) as llm:
        assert llm.load_session(path) == {"messages": []}
        assert not llm.has_open_prompt
    assert _chat(model, monkeypatch, b"the art\n", *session) == 0
    assert [m["content"] for m in _saved_messages(model, path)][:1] == ["the art"]


def test_a_conversation_outlives_an_interrupted_prefill(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    session = ["--session", str(tmp_path / "s")]
    n_prefills = 0

    def interrupt_second(bars: ProgressBars, stage: str, done: int, total: int) -> None:
        nonlocal n_prefills
        n_prefills += stage == "prefill" and done == 0
        if stage == "prefill" and n_prefills > 1 and done > 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBars, "__call__", interrupt_second)
        # The third line, which would be answered without the second, is not.
        assert _chat(model, monkeypatch, b"the art\nthe hen\nand it\n", *session) == 130
    assert n_prefills == 2
    answer = capsys.readouterr().out.removesuffix("\n")
    assert _saved_messages(model, tmp_path / "s") == [
        {"role": "user", "content": "the art"},
        {"role": "assistant", "content": answer},
    ]
    assert _chat(model, monkeypatch, b"the hen\n", *session) == 0
    assert len(_saved_messages(model, tmp_path / "s")) == 4


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_prompt_is_read_only_from_where_it_was_left(
    model: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reason: BaseException,
) -> None:
    """A tiny model reads too fast for a signal to meet it; its handler is where this raises."""
    command = ["run", model, *SHORT, "-f", text, "--json"]
    assert main(command) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["prompt_tokens"] > 3 * 64
    command += ["--session", str(tmp_path / "s")]

    def interrupt(bars: ProgressBars, stage: str, done: int, total: int) -> None:
        if stage == "prefill" and done > 130:
            raise reason

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBars, "__call__", interrupt)
        if isinstance(reason, SystemExit):
            with pytest.raises(SystemExit):
                main(command)
        else:
            assert main(command) == 130
    capsys.readouterr()
    assert main(command) == 0
    rest = json.loads(capsys.readouterr().out)
    assert (whole["cached_tokens"], rest["cached_tokens"]) == (0, 128)
    assert rest["token_ids"] == whole["token_ids"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_the_conversation(
    model: str,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-m", "edgeh2o", "chat", model, *SHORT[:-1], "--verbose"]
    with subprocess.Popen(
        [*command, "--session", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"the art\n")
        process.stdin.flush()
        while not process.stderr.readline().startswith(b"memory"):
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    roles = [message["role"] for message in _saved_messages(model, path)]
    assert roles == ["user", "assistant"]


def test_a_prompt_that_was_read_is_saved_though_its_answer_is_not(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["run", model, *SHORT, "-p", PROMPT, "--session", str(tmp_path / "s")]
    with open("/dev/full", "w") as full:
        assert (
            subprocess.run(
                [sys.executable, "-m", "edgeh2o", *command], stdout=full, stderr=subprocess.PIPE
            ).returncode
            == 1
        )
    assert main([*command, "--json"]) == 0
    assert _cached_tokens(capsys) > 0

"""``edgeh2o chat`` and the chat and session flags of ``run``, on a tiny model."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import LLM, H2OConfig, PrefillConfig
from edgeh2o.cli.main import main
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tokenizer import CHAT_TEMPLATE

PROMPT = "the thing is that the art is there"
SHORT = ["--temp", "0", "--ignore-eos", "-n", "5", "-ub", "16", "-b", "64", "--h2o-local", "4"]
SHORT += ["--h2o-heavy", "4"]
# Those of SHORT, as LLM takes them.
SETTINGS: dict[str, Any] = {
    "attention": H2OConfig(local=4, heavy=4),
    "prefill": PrefillConfig(batch_size=64, chunk_size=16),
}


def _run(model: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["run", model, "--json", *SHORT, *options]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def _chat(model: str, monkeypatch: pytest.MonkeyPatch, lines: bytes, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    return main(["chat", model, *SHORT, *options])


def test_run_takes_raw_text_unless_chat_is_asked_for(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = _run(model, capsys, "-p", PROMPT)
    assert _run(model, capsys, "-p", PROMPT, "--no-chat")["token_ids"] == raw["token_ids"]
    chat = _run(model, capsys, "-p", PROMPT, "--chat")
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    assert chat["token_ids"] == _run(model, capsys, "-p", rendered)["token_ids"]
    system = _run(model, capsys, "-p", PROMPT, "--chat", "--system", "in")
    assert system["prompt_tokens"] > chat["prompt_tokens"] > raw["prompt_tokens"]


def test_a_chat_goes_on_past_the_context(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = b"".join(b"the art is %d\n" % i for i in range(12))
    options = ["-c", "128", "--system", "in", "--session", str(tmp_path / "chat")]
    assert _chat(model, monkeypatch, lines, *options) == 2
    assert "tokens and the context holds 128" in capsys.readouterr().err
    (tmp_path / "chat").unlink()
    assert _chat(model, monkeypatch, lines, *options, "--context-full", "shift") == 0
    assert "messages are forgotten" in capsys.readouterr().err
    with LLM(model, context_size=128, **SETTINGS) as llm:
        messages = llm.load_session(tmp_path / "chat")["messages"]
    assert messages[0] == {"role": "system", "content": "in"}
    assert [message["role"] for message in messages[1:3]] == ["user", "assistant"]
    assert messages[-2]["content"] == "the art is 11"
    assert len(messages) < 24


def test_a_message_that_cannot_be_rendered_is_not_saved(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next session went on with two messages of the user in a row."""
    template = tmp_path / "template"
    template.write_text(
        "{% if messages[-1].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        + CHAT_TEMPLATE
    )
    options = ["--chat-template", str(template), "--session", str(tmp_path / "chat")]
    lines = b"the art\nbad\n"
    assert _chat(model, monkeypatch, lines, *options, "--context-full", "shift") != 0
    with LLM(model, **SETTINGS) as llm:
        messages = llm.load_session(tmp_path / "chat")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]


def test_a_chat_goes_on_by_eviction(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No message is forgotten, and each turn goes on from what is cached."""
    lines = b"".join(b"the art is %d\n" % i for i in range(12))
    options = ["-c", "128", "--session", str(tmp_path / "chat"), "--context-full", "evict", "-v"]
    # What is generated hangs on the rounding, and whether its text has the same tokens on that.
    options += ["--isa", "scalar"]
    assert _chat(model, monkeypatch, lines, *options) == 0
    err = capsys.readouterr().err
    assert "forgotten" not in err
    turns = err.split("load  ")[1:]
    assert "tokens evicted" in turns[-1]
    assert "more from the cache" in turns[-1]
    with LLM(model, context_size=128, **SETTINGS) as llm:
        messages = llm.load_session(tmp_path / "chat")["messages"]
    assert len(messages) == 24
    # Of the session there are the messages: the next turn reads them anew, past the context.
    assert _chat(model, monkeypatch, b"the end\n", *options) == 0


def test_variables_of_the_template(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "template"
    path.write_text(
        "{{ messages[0].content }}{% if thinks is defined and not thinks %} is it{% endif %}"
    )
    options = ["-p", PROMPT, "--chat", "--chat-template", str(path)]
    plain = _run(model, capsys, "-p", PROMPT)
    longer = _run(model, capsys, "-p", PROMPT + " is it")
    assert _run(model, capsys, *options)["token_ids"] == plain["token_ids"]
    changed = _run(model, capsys, *options, "--chat-template-kwargs", '{"thinks": false}')
    assert changed["prompt_tokens"] == longer["prompt_tokens"] > plain["prompt_tokens"]
    assert changed["token_ids"] == longer["token_ids"]


def test_a_template_from_a_file(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "template"
    path.write_text("{{ messages[0].content }}", encoding="utf-8")
    options = ["-p", PROMPT, "--chat", "--chat-template", str(path)]
    chat = _run(model, capsys, *options)
    assert chat["token_ids"] == _run(model, capsys, "-p", PROMPT)["token_ids"]
    path.write_text("{% if %}", encoding="utf-8")
    assert main(["run", __file__, *options]) == 1  # before the model is looked at
    stderr = capsys.readouterr().err
    assert "the chat template fails (line 1)" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (["--system", "x"], "--system is for a prompt that is the message of a chat; add --chat"),
        (["--chat-template-kwargs", "{}"], "--chat-template-kwargs is for a prompt that is"),
        (["--chat", "--chat-template-kwargs", "[1]"], "takes one JSON object"),
        (["--chat", "--chat-template-kwargs", "{"], "takes one JSON object"),
        (["--session-read-only"], "--session-read-only needs --session"),
        (["--session", "none", "--session-read-only"], "does not exist"),
        (["--session", "no/such/folder/s"], "there is no folder"),
        (["--chat", "--chat-template", "none"], "cannot read"),
    ],
)
def test_flags_that_do_not_fit(
    model: str, capsys: pytest.CaptureFixture[str], options: list[str], fragment: str
) -> None:
    assert main(["run", model, "-p", "x", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert fragment in captured.err


def test_a_session_file_saves_the_reading(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    session = ["--session", str(tmp_path / "s")]
    first = _run(model, capsys, "-p", PROMPT, *session)
    assert first["cached_tokens"] == 0
    saved = (tmp_path / "s").read_bytes()
    longer = PROMPT + first["text"] + " and all that"
    second = _run(model, capsys, "-p", longer, *session, "--session-read-only")
    assert second["cached_tokens"] == first["prompt_tokens"] + 4
    assert (tmp_path / "s").read_bytes() == saved
    again = _run(model, capsys, "-p", PROMPT, *session)
    assert again["cached_tokens"] == again["prompt_tokens"]
    assert again["token_ids"] == first["token_ids"]
    assert main(["run", model, "-p", "x", *SHORT, *session, "-ub", "32"]) == 2
    assert "was made with chunk_size 16; this run has 32" in capsys.readouterr().err


def test_turns_of_a_chat(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    lines = b"the art\n\n/help\nof \\\nall\r\n/nothing\n"
    options = ["--session", str(path), "--system", "in"]
    assert _chat(model, monkeypatch, lines, *options, "--verbose") == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") >= 2
    assert "/reset  forget" in captured.err
    assert "there is no command /nothing" in captured.err
    assert "more from the cache)" in captured.err
    first = captured.out
    # A conversation goes on where it was.
    assert _chat(model, monkeypatch, b"in", *options, "--verbose") == 0
    captured = capsys.readouterr()
    assert "more from the cache)" in captured.err
    # From the beginning, the same is said.
    assert _chat(model, monkeypatch, lines, "--system", "in", "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.out == first
    assert "from the cache" not in captured.err


def test_reset_and_exit(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _chat(model, monkeypatch, b"the art\n/reset\nthe art\n/exit\nin\n", "--quiet") == 0
    answers = capsys.readouterr().out
    half = len(answers) // 2
    assert answers[:half] == answers[half:]


def test_an_answer_again(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _chat(model, monkeypatch, b"\xef\xbb\xbf/regen\nthe art\n/regen\nin\n", "--quiet") == 0
    captured = capsys.readouterr()
    assert captured.err == "there is no answer yet\n"
    assert _chat(model, monkeypatch, b"the art\nin\n", "--quiet") == 0
    plain = capsys.readouterr().out
    answer = captured.out[: len(captured.out) - len(plain)]
    assert captured.out == answer + plain
    assert plain.startswith(answer)
    # Drawn again with a seed it is another one, and the same at every run.
    lines, options = b"the art\n/regen\n/clear\n", ("--temp", "9", "--seed", "3", "--quiet")
    outputs = []
    for _ in range(2):
        assert _chat(model, monkeypatch, lines, *options) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    first, second = outputs[0][: len(outputs[0]) // 2], outputs[0][len(outputs[0]) // 2 :]
    assert first != second


def test_an_answer_that_the_context_cuts_off(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["-c", "64", "-n", "-1"]
    assert main(["run", model, *SHORT, "-p", PROMPT, *options]) == 0
    assert "the context of 64 positions is full (see -c)" in capsys.readouterr().err
    assert main(["run", model, *SHORT, "-p", PROMPT, "-c", "64"]) == 0
    assert "is full" not in capsys.readouterr().err
    assert _chat(model, monkeypatch, b"in\n", *options) == 0
    assert capsys.readouterr().err == (
        "(the context is full; /reset forgets the conversation, -c sets its size, "
        "--context-full evict goes on)\n"
    )
    assert _chat(model, monkeypatch, b"in\n", *options, "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_errors_end_a_piped_chat(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _chat(model, monkeypatch, b"in\n" + b"the " * 500, "-c", "64") == 2
    assert "the context holds 64" in capsys.readouterr().err
    assert _chat(model, monkeypatch, b"caf\xe9\n") == 2
    assert "standard input is not UTF-8" in capsys.readouterr().err


def _read_until(descriptor: int, text: bytes, seconds: float = 60) -> bytes:
    seen = b""
    deadline = time.monotonic() + seconds
    while text not in seen:
        assert time.monotonic() < deadline, seen
        seen += os.read(descriptor, 1024)
    return seen


def test_a_terminal_chat(model: str) -> None:
    """Ctrl-C stops the answer, not the program; /exit leaves."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "edgeh2o", "chat", model, "--ignore-eos", "-c", "200000"]
    with subprocess.Popen(
        command, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.write(leader, b"the art\n")
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        os.set_blocking(process.stdout.fileno(), True)
        _read_until(process.stderr.fileno(), b"(stopped)")
        os.write(leader, b"/exit\n")
        _, stderr = process.communicate(timeout=60)
    os.close(leader)
    os.close(follower)
    assert process.returncode == 0
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("has_readline", [True, False])
def test_a_paste_of_several_lines_is_one_message(
    model: str, tmp_path: Path, has_readline: bool
) -> None:
    """With readline, and without it, which input() leaves out when stdout is no terminal."""
    leader, follower = pty.openpty()
    session = tmp_path / "s"
    command = [sys.executable, "-m", "edgeh2o", "chat", model, *SHORT, "--session", str(session)]
    with subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower if has_readline else subprocess.DEVNULL,
        stderr=follower,
        env=os.environ | {"TERM": "xterm"},
    ) as process:
        _read_until(leader, b"\x1b[?2004h")
        os.write(leader, b"\x1b[200~the art\rof\n\n/exit\n\x1b[201~ all\r")
        _read_until(leader, b"positions]")
        os.write(leader, b"/exit\r")
        _read_until(leader, b"\x1b[?2004l")
        assert process.wait(timeout=60) == 0
    os.close(leader)
    os.close(follower)
    with LLM(model, **SETTINGS) as llm:
        messages = llm.load_session(session)["messages"]
    assert [m["content"] for m in messages[::2]] == ["the art\nof\n\n/exit\n all"]


def test_the_template_is_looked_at_before_the_first_message(
    tiny_model: TinyModelFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "template"
    path.write_text(CHAT_TEMPLATE + "{% endfor %}", encoding="utf-8")
    model = str(tiny_model(tensor_type="Q4_0"))
    assert _chat(model, monkeypatch, b"", "--chat-template", str(path)) == 1
    assert "the chat template fails" in capsys.readouterr().err

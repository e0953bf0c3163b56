"""``edgeh2o run`` on a tiny model: what goes to stdout and stderr, and how it ends."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeh2o import isa
from edgeh2o.cli import progress
from edgeh2o.cli.main import main
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.runners.native import NativeModelFile
from edgeh2o.tokenizer import build_tokenizer
from tests.cli.conftest import ExpectUsageError

PROMPT = "the thing is that the art is there"
JSON_FIELDS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "generated_tokens",
    "finish_reason",
    "load_s",
    "ttft_s",
    "prefill_tps",
    "decode_tps",
    "peak_rss_bytes",
    "pairs_computed",
    "pairs_dense",
    "isa",
    "threads",
}


@pytest.fixture
def keep_isa() -> Iterator[None]:
    """The instruction set belongs to the process; a test that changes it puts it back."""
    active = isa.active()
    yield
    isa.use(active)


def _run(model: str, *options: str) -> int:
    return main(["run", model, "-p", PROMPT, "--temp", "0", "--ignore-eos", "-n", "6", *options])


def test_answer_to_stdout_and_statistics_to_stderr(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(model) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    names = [line.split("  ")[0] for line in captured.err.strip().splitlines()]
    assert names == ["load", "first token", "prefill", "decode", "pairs", "memory", "run"]


def test_quiet_prints_the_answer_only(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(model) == 0
    loud = capsys.readouterr()
    assert _run(model, "--quiet") == 0
    quiet = capsys.readouterr()
    assert quiet.out == loud.out
    assert quiet.err == ""


def test_json_is_one_object(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(model) == 0
    text = capsys.readouterr().out
    sizes = ["-b", "64", "-ub", "16", "--h2o-local", "4", "--h2o-heavy", "4"]
    assert _run(model, "--json", "-t", "1", *sizes) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    values = json.loads(captured.out)
    assert values.keys() >= JSON_FIELDS
    assert values["text"] == text.removesuffix("\n")
    assert len(values["token_ids"]) == values["generated_tokens"] == 6
    assert values["finish_reason"] == "length"
    assert (values["threads"], values["batch_size"], values["chunk_size"]) == (1, 64, 16)
    assert values["attention"].items() >= {"algorithm": "h2o", "local": 4, "heavy": 4}.items()


def test_both_budgets_at_zero_mean_dense(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(model, "--json", "--h2o-local", "0", "--h2o-heavy", "0") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["attention"] == {"algorithm": "dense"}
    assert values["pairs_computed"] == values["pairs_dense"]


def test_budgets_larger_than_a_chunk_are_clamped_with_a_warning(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-ub", "16", "-b", "64", "--h2o-local", "16", "--h2o-heavy", "8"]
    assert _run(model, "--json", *options) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("edgeh2o: warning: ")
    assert captured.err.count("\n") == 1
    attention = json.loads(captured.out)["attention"]
    assert attention["local"] + attention["heavy"] < 16


@pytest.mark.usefixtures("keep_isa")
def test_verbose_says_what_is_loaded(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(model, "--verbose", "--isa", "scalar") == 0
    stderr = capsys.readouterr().err
    assert f"{model}: llama, 3 layers, 8 query heads, 2 KV heads of 32" in stderr
    assert "kernels: scalar" in stderr


def test_no_special_takes_control_tokens_literally(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = []
    for options in ([], ["--no-special"]):
        prompt = ["-p", "<|im_start|>", "-n", "1", "--temp", "0", "--json"]
        assert main(["run", model, *prompt, *options]) == 0
        counts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert counts[0] == 1
    assert counts[1] > 1


def test_unknown_isa_lists_what_exists(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(model, "--isa", "z80") == 2
    stderr = capsys.readouterr().err
    assert "z80" in stderr
    assert "scalar" in stderr


@pytest.mark.parametrize(
    ("options", "code", "fragment"),
    [
        (["-p", ""], 2, "the prompt is empty"),
        (["-p", PROMPT, "-c", "2"], 2, "and the context holds 2; use -c"),
        (["-p", "e " * 20_000], 2, "beyond the 2048 positions that the model was trained on"),
        (["-p", PROMPT, "-c", "2000000000"], 1, "the largest context that fits is -c"),
    ],
)
def test_prompts_and_contexts_that_do_not_fit(
    model: str, capsys: pytest.CaptureFixture[str], options: list[str], code: int, fragment: str
) -> None:
    assert main(["run", model, *options]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("edgeh2o: error: ")
    assert captured.err.count("\n") == 1
    assert fragment in captured.err


def test_progress_bar_is_for_terminals_only(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run(model) == 0
    assert "Reading the prompt" not in capsys.readouterr().err
    monkeypatch.setattr(
        "edgeh2o.cli.model_options.progress_on_stderr",
        lambda *, quiet: progress.ProgressBars(is_shown=True),
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    assert _run(model) == 0
    captured = capsys.readouterr()
    assert "Reading the prompt" in captured.err
    assert "tokens/s" in captured.err
    assert "Reading" not in captured.out


def test_progress_takes_one_line_of_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 40 columns a bar was cut to "15/..." and took two lines, which moved what was above."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    bars = progress.ProgressBars(is_shown=True)
    for done in (0, 1500, 3647):
        bars("prefill", done, 3647)
    bars.close()
    shown = [
        line.strip()
        for line in re.split(r"\x1b\[[^A-Za-z]*[A-Za-z]|[\r\n]", capsys.readouterr().err)
    ]
    lines = [line for line in shown if line]
    assert lines and all(re.fullmatch(r"Reading the prompt +\d+%", line) for line in lines), lines


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt, 130, "edgeh2o: interrupted\n"),
        (MemoryError, 1, "edgeh2o: error: out of memory; use a smaller model"),
    ],
)
def test_load_that_is_cut_short(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    code: int,
    line: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(NativeModelFile, "load", fail)
    assert _run(model) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1


def test_memory_that_a_limit_of_addresses_refuses(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (2**30, 2**30))
        raise MemoryError

    monkeypatch.setattr(NativeModelFile, "load", fail)
    assert _run(model) == 1
    limit = "addresses are limited to 1048576 kB (ulimit -v); raise that limit, or use a smaller"
    assert limit in capsys.readouterr().err


def _start(model: str, *options: str) -> subprocess.Popen[bytes]:
    """A run that goes on until it is stopped."""
    command = [sys.executable, "-m", "edgeh2o", "run", model, "-p", PROMPT]
    return subprocess.Popen(
        [*command, "--ignore-eos", "-c", "200000", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_ctrl_c_prints_the_statistics_so_far(model: str) -> None:
    with _start(model) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted; so far:" in stderr
    assert b"decode" in stderr
    assert b"Traceback" not in stderr


def test_closed_stdout_ends_quietly(model: str) -> None:
    with _start(model, "--quiet") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 141
    assert b"Error" not in stderr
    assert b"Traceback" not in stderr


def test_address_space_limit_is_met_with_numbers(model: str) -> None:
    limit = 4 * 2**30
    result = subprocess.run(
        [sys.executable, "-m", "edgeh2o", "run", model, "-p", PROMPT, "-c", "30000000"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert result.returncode == 1
    assert "are available within the limit of addresses (ulimit -v)" in result.stderr
    assert "; the largest context that fits is -c" in result.stderr
    assert result.stdout == ""


def test_long_prompt_example_is_complete(smollm2_path: Path) -> None:
    """More than 4,096 tokens; after the one newline that -f drops, the answer's turn begins."""
    text = (Path(__file__).parents[2] / "examples/long_prompt.txt").read_text(encoding="utf-8")
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n\n")
    with open_gguf(smollm2_path) as gguf:
        tokenizer = build_tokenizer(gguf.metadata)
    assert 4300 < len(tokenizer.encode(text.removesuffix("\n"), parse_special=True)) < 4800


def test_memory_profile_lies_beside_its_picture(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "memory.JSON"
    assert _run(model, "--memory-profile", str(path), "--json") == 0
    allocated = json.loads(capsys.readouterr().out)["memory_bytes"]
    content = json.loads(path.read_text())
    assert content["allocated_bytes"] == allocated
    assert [p["name"] for p in content["phases"]] == ["start", "load", "prefill 1", "decode"]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_memory_profile_of_an_unknown_kind_is_refused_before_the_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "missing.gguf", "-p", "x", "--memory-profile", "memory.txt"]) == 2
    assert "name it memory.csv or memory.json" in capsys.readouterr().err


def test_answers_of_a_given_form(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    expect_usage_error: ExpectUsageError,
) -> None:
    schema, grammar, wrong = (tmp_path / name for name in ("s.json", "g.gbnf", "wrong.lark"))
    enum = '{"enum": ["hen", "pen"]}'
    schema.write_text(enum)
    grammar.write_text('root ::= "a" "b"')
    wrong.write_text("start: nothing")
    run = ["run", model, "-p", "the", "--quiet"]
    for given in (["--json-schema", str(schema)], ["-j", enum]):
        assert main([*run, *given]) == 0
        assert capsys.readouterr().out.strip() in ('"hen"', '"pen"')
    for text in (str(grammar), grammar.read_text()):
        assert main([*run, "--grammar", text]) == 0
        assert capsys.readouterr().out == "ab\n"
    expect_usage_error(main([*run, "--grammar", str(wrong)]), "the lark cannot be used")
    expect_usage_error(
        main([*run, "--grammar", str(grammar), "--json-schema", str(schema)]), "not allowed with"
    )

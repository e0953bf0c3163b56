"""Bad options and prompts: one line on stderr, nothing on stdout, the right exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from edgeh2o.cli.report import printable
from tests.tiny_models import TinyModelFactory

# Options are checked before the model is looked at, so the file need not exist.
MODEL = "missing.gguf"

BAD_OPTIONS = [
    (["-ub", "0"], "--chunk-size"),
    (["-ub", "-1"], "--chunk-size"),
    (["-b", "0"], "--batch-size"),
    (["-b", "512", "-ub", "1024"], "use -ub 512 or less"),
    (["-b", "1500", "-ub", "1024"], "-b 1024"),
    (["-b", "1500", "--attention", "h2o"], "-b 1024"),
    (["-b", "1500"], "-b 1280"),
    (["-t", "0"], "--threads"),
    (["-t", "1000000"], "--threads"),
    (["-t", "two"], "invalid int value: 'two'"),
    (["-c", "-1"], "--ctx-size"),
    (["-c", "99999999999"], "--ctx-size"),
    (["--temp", "nan"], "--temp"),
    (["--temp", "inf"], "--temp"),
    (["--temp", "-1"], "--temp"),
    (["--temp", "warm"], "invalid float value: 'warm'"),
    (["--top-p", "0"], "--top-p"),
    (["--top-p", "2"], "--top-p"),
    (["--top-k", "-1"], "--top-k"),
    (["--min-p", "1.5"], "--min-p"),
    (["--repeat-penalty", "0"], "--repeat-penalty"),
    (["--repeat-last-n", "-2"], "--repeat-last-n"),
    (["--seed", "-3"], "--seed"),
    (["--stop", ""], "--stop"),
    (["-n", "-2"], "--max-tokens) must be an integer >= -1, got -2"),
    (["-n", "99999999999"], "--max-tokens) must be an integer from -1 to 2147483647, got 9999"),
    (["--cache-type", "q1"], "argument --cache-type: invalid choice: 'q1' (choose from"),
    (["--chat-template", "-x"], "expected one argument (one that begins with a dash goes after ="),
    (["--isa", ""], "--isa"),
    (["--h2o-local", "-1"], "local"),
    (["--h2o-heavy", "-1"], "heavy"),
    (["--quiet", "--verbose"], "not allowed with"),
    (["--stop", "-n", "3"], "argument --stop/-r/--reverse-prompt: expected one argument"),
    (["-hx", "x"], "unrecognized arguments: -hx"),
    (["-hf", "model"], "argument -hf/--hf-repo: 'model' is not of the form org/name"),
    (["-hf", "https://example.com/a/b"], "is not the address of a model of the Hugging Face Hub"),
    (["-mu", "https://x.org/a"], "-mu https://x.org/a: models are fetched from the Hugging Face"),
    (["-ngl", "99"], "-ngl 99: a GPU takes all layers"),
    (["--n-gpu-layers=all"], "--n-gpu-layers all: a GPU takes all layers"),
    (["-tb", "2"], "-tb 2: one number of threads serves prompt and answer; use -t"),
    (["-ctk", "q4_0", "-ctv", "q4_0"], "argument -ctk/--cache-type-k: invalid choice: 'q4_0'"),
    (["-ctv"], "argument -ctv/--cache-type-v: expected one argument"),
    (["-e", "-p", r"\xff"], "the prompt of -p with -e is not UTF-8 text"),
    (["--draft-tokens", "4"], "--draft-tokens 4 needs a draft model; name one with --draft"),
    (["--rope-scaling", "none", "--yarn-orig-ctx", "64"], "changes nothing with --rope-scaling"),
    (["--warp"], "unrecognized arguments: --warp; see 'edgeh2o run --help'"),
    (["--tem", "0.5"], "unrecognized arguments: --tem 0.5 (did you mean --temp?)"),
    (["--chat", "--chat-template", "none.jinja"], "check --chat-template"),
    (["--context-full", "shift", "-c", "32"], "use -c 64 or more"),
    (["--context-full", "evict", "--draft", MODEL], "(--draft) does not go with --context-full"),
    (["--context-full", "evict", "-ctk", "q8_0"], "keys of cache type q8_0"),
    (["--context-full", "evict", "--device", "cuda"], "use --context-full shift"),
    *(
        (["--context-full", "evict", "--attention", rule], f"{rule} says what generated tokens")
        for rule in ("quest", "rocketkv", "ruvllm")
    ),
    (["--context-full", "evict", "--decode-attention", "headwise"], "or --decode-attention dense"),
    (["--chat", "--chat-template", "/"], "give a text file to --chat-template"),
]


def _expect_one_line(stderr: str, fragment: str) -> None:
    assert stderr.startswith("edgeh2o: error: ")
    assert stderr.count("\n") == 1
    assert fragment in stderr


@pytest.mark.parametrize(("options", "fragment"), BAD_OPTIONS, ids=lambda v: str(v))
def test_bad_options(capsys: pytest.CaptureFixture[str], options: list[str], fragment: str) -> None:
    assert main(["run", MODEL, "-p", "hello", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    _expect_one_line(captured.err, fragment)


@pytest.mark.parametrize("verb", [["chat"], ["serve"], ["batch"], ["batch", "--dask", "tcp://x:1"]])
def test_options_that_exclude_each_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: list[str]
) -> None:
    """Whatever the model, which need not be there; a cluster answered every request so."""
    files = ["in.jsonl", "-o", str(tmp_path / "out.jsonl")] if verb[0] == "batch" else []
    given = [verb[0], MODEL, *files, *verb[1:], "--context-full", "evict", "--lookup", "4"]
    assert main(given) == 2
    _expect_one_line(capsys.readouterr().err, "lookup (--lookup) 4 does not go with")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["walk"], "there is no command 'walk'; see 'edgeh2o --help'"),
        (["run"], "no model given: name a GGUF file"),
        (["inspect"], "no model given: name a GGUF file"),
        (["run", MODEL, "-m", MODEL, "-p", "a"], "-m/--model: not allowed with argument MODEL"),
        (["run", MODEL, "-t", "1", "-", "-p", "a"], "not allowed with argument -"),
        (["run", MODEL], "no prompt given: use -p TEXT, -f FILE, or -"),
        (["run", MODEL, "hello"], "unrecognized arguments: hello (the prompt goes after -p"),
        (["run", MODEL, "-p", "two", "words"], "unrecognized arguments: words (the prompt goes"),
        (["run", MODEL, "-p", "a", "-f", "b"], "not allowed with"),
        (["run", MODEL, "-p", "a\udcff"], "argument -p/--prompt: not valid UTF-8 at byte 1"),
        (["run", MODEL, "-p", "a", "--stop", "\udcff"], "argument --stop"),
        (["chat", MODEL, "--system", "caf\udce9"], "/--system-prompt: not valid UTF-8 at byte 3"),
        (
            ["run", MODEL, "-f", "-", "--grammar", "-"],
            "standard input can be the prompt or --grammar, not both; give a file for the other",
        ),
        (["run", MODEL, "-", "--json-schema", "-"], "can be the prompt or --json-schema, not both"),
        (["run", "", "-p", "a"], "no model given"),
        (["pull"], "required: NAME"),
        (["batch", "a", "b", "-md", "small.gguf"], "-md small.gguf: this command has no draft"),
        (["batch", "a", "b", "--draft-max", "5"], "--draft-max 5: this command has no draft model"),
        (["serve", MODEL, "--draft-max", "5"], "--draft-tokens 5 needs a draft model; name one"),
        (["run", MODEL, "--spec-type", "draft-mtp"], "write --draft mtp for draft-mtp"),
        (["batch", "a", "b", "--draft-tokens=5"], "--draft-tokens 5: this command has no draft"),
    ],
    ids=lambda v: " ".join(v).encode("ascii", "replace").decode() if isinstance(v, list) else "",
)
def test_bad_command_lines(
    capsys: pytest.CaptureFixture[str], arguments: list[str], fragment: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    _expect_one_line(captured.err, fragment)


def test_prompt_files_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    (tmp_path / "wide.txt").write_text("caf\xe9", encoding="utf-16")
    for path, fragment in [
        (tmp_path / "none.txt", "No such file"),
        (tmp_path, "is a directory"),
        (latin, "latin.txt is not UTF-8 text: invalid continuation byte at byte 3"),
        (tmp_path / "wide.txt", "wide.txt is UTF-16 text; convert it to UTF-8"),
    ]:
        assert main(["run", MODEL, "-f", str(path)]) == 2
        _expect_one_line(capsys.readouterr().err, fragment)


def test_stdin_that_is_not_utf8(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["-"], ["-f", "-"]):
        stdin = io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["run", MODEL, *arguments]) == 2
        _expect_one_line(capsys.readouterr().err, "standard input is not UTF-8 text")


def test_missing_model_is_a_failure_not_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", MODEL, "-p", "hello"]) == 1
    _expect_one_line(capsys.readouterr().err, "missing.gguf")


def test_what_is_no_name_is_not_pulled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    for name, code, fragment in [
        (
            "no-such-model",
            1,
            "'no-such-model' is not the name of a known model (smollm2-135m), nor",
        ),
        ("/", 1, "'/' is not the name"),
        ("../../etc", 1, "nor of the form org/name[:file]"),
        (str(tmp_path), 1, "nor a model on this machine"),
        (str(tmp_path / "text.txt"), 1, "nor a model on this machine"),
        ("nul\0byte", 1, "is not the name"),
        ("", 2, "no name given"),
        ("https://example.com/org/name", 2, "use org/name or org/name:file"),
    ]:
        assert main(["pull", name]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        _expect_one_line(captured.err, fragment)


def test_a_folder_of_safetensors_is_not_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["export-onnx", str(tmp_path), str(tmp_path / "out")]) == 2
    _expect_one_line(capsys.readouterr().err, "export-onnx takes a GGUF file; write one of the")


def test_a_file_that_may_not_be_read_needs_no_space(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "folder/genai_config.json")

    monkeypatch.setattr("edgeh2o.formats.model_cache.resolve_model", refuse)
    assert main(["inspect", "folder"]) == 1
    message = "folder/genai_config.json: Permission denied; check its permissions"
    _expect_one_line(capsys.readouterr().err, message)


def test_a_model_of_this_machine_is_not_pulled(
    capsys: pytest.CaptureFixture[str], tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    for path in (str(tiny_model()), str(tmp_path)):
        assert main(["pull", path]) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{path}\n"
        assert "is on this machine already" in captured.err


def test_a_name_of_the_hub_in_place_of_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    for name, hint in [
        ("org/name", "or run 'edgeh2o pull org/name' and use what it prints"),
        ("https://hf.co/org/name", "or run 'edgeh2o pull org/name' and use what it prints"),
        ("org/name:Q4_K_M", "run 'edgeh2o pull org/name:Q4_K_M'"),
    ]:
        for command in (["run", name, "-p", "x"], ["inspect", name]):
            assert main(command) == 1
            _expect_one_line(capsys.readouterr().err, hint)
    for name in ("models/missing.gguf", "../missing", "no-such-model", "https://example.com/a/b"):
        assert main(["run", name, "-p", "x"]) == 1
        assert "edgeh2o pull" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["run", MODEL, "-p", "x", "--temp", "nan"], 2), (["run", MODEL, "-p", "x"], 1)],
)
def test_process_ends_with_the_code_and_no_traceback(arguments: list[str], code: int) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "edgeh2o", *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == code
    assert result.stdout == ""
    _expect_one_line(result.stderr, "edgeh2o")


def test_arguments_are_utf8_in_any_locale(tiny_model: TinyModelFactory) -> None:
    command = [sys.executable, "-m", "edgeh2o", "run", str(tiny_model()), "-n", "0", "--json"]
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    counts = set()
    for locale in ({"LC_ALL": "C.UTF-8"}, plain):
        result = subprocess.run(
            [*command, "-p", "na\u00efve"], capture_output=True, check=True, env=os.environ | locale
        )
        counts.add(json.loads(result.stdout)["prompt_tokens"])
    assert len(counts) == 1


def test_names_of_files_are_utf8_in_any_locale(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    """They were question marks in JSON, and surrogates in errors."""
    (tmp_path / "na\u00efve \u65e5.gguf").write_bytes(tiny_model().read_bytes())
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    plain["PYTHONPATH"] = str(Path(__file__).parents[2])
    shown = []
    for words in (["inspect", "na\u00efve \u65e5.gguf", "--json"], ["inspect", "\u65e5"]):
        result = subprocess.run(
            [sys.executable, "-m", "edgeh2o", *words],
            capture_output=True,
            check=False,
            cwd=tmp_path,
            env=os.environ | plain,
        )
        shown.append((result.stdout + result.stderr).decode("utf-8"))
    assert json.loads(shown[0])["file"] == "na\u00efve \u65e5.gguf"
    assert shown[1].startswith("edgeh2o: error: \u65e5: no such file")
    assert printable("a\udcc3\udcb6 \udcff \ud83d") == "a\xf6 \ufffd ?"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in [
        (["--version"], "edgeh2o 0."),
        (["--help"], "usage: edgeh2o"),
        (["run", "--help"], "--h2o-local"),
    ]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out

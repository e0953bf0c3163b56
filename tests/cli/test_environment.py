"""Environment variables for flags: one rule, and a flag beats its variable."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

import edgeh2o
from edgeh2o.cli.environment import OTHER_VARIABLES, VARIABLES, variables_of
from edgeh2o.cli.main import build_parser, main
from edgeh2o.cli.parser import Parser, environment_variable, takes_value
from tests.tiny_models import TinyModelFactory

MODEL = "missing.gguf"


def _parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["run", MODEL, *arguments])


def test_variables_set_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "CTX_SIZE": "77",
        "TEMP": "0.25",
        "STOP": "end",
        "IGNORE_EOS": "1",
        "QUIET": "no",
        "CHAT": "yes",
        "NO_SPECIAL": "on",
    }.items():
        monkeypatch.setenv(f"EDGEH2O_{name}", value)
    args = _parse("-p", "x")
    assert (args.context_size, args.temperature, args.stop) == (77, 0.25, ["end"])
    assert (args.ignore_eos, args.quiet, args.chat) == (True, False, True)
    assert args.parse_special is False


def test_a_flag_beats_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEH2O_CTX_SIZE", "77")
    monkeypatch.setenv("EDGEH2O_STOP", "end")
    monkeypatch.setenv("EDGEH2O_CHAT", "1")
    args = _parse("-p", "x", "-c", "9", "--stop", "a", "--stop", "b", "--no-chat")
    assert (args.context_size, args.stop, args.chat) == (9, ["a", "b"], False)


def test_a_flag_beats_the_variable_of_one_that_it_excludes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEH2O_QUIET", "1")
    monkeypatch.setenv("EDGEH2O_PROMPT", "from the environment")
    args = _parse("--verbose", "-f", "file")
    assert (args.quiet, args.verbose) == (False, True)
    assert (args.prompt, args.prompt_file) == (None, "file")
    assert _parse().prompt == "from the environment"


def test_the_model_may_come_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEH2O_MODEL", "variable.gguf")
    parse = build_parser().parse_args
    assert parse(["run", "-p", "x"]).model == "variable.gguf"
    assert parse(["run", "given.gguf", "-p", "x"]).model == "given.gguf"
    assert parse(["run", "-p", "x", "-m", "given.gguf"]).model == "given.gguf"


def test_parsing_again_sees_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = Parser()
    parser.add_argument("--size", type=int, default=3)
    monkeypatch.setenv("EDGEH2O_SIZE", "5")
    assert parser.parse_args([]).size == 5
    monkeypatch.delenv("EDGEH2O_SIZE")
    assert parser.parse_args([]).size == 3


@pytest.mark.parametrize(
    ("name", "value", "fragment"),
    [
        ("THREADS", "two", "EDGEH2O_THREADS: invalid int value: 'two'"),
        ("THREADS", "0", "threads (--threads) must be an integer from 1"),
        ("TEMP", "-1", "(set by EDGEH2O_TEMP)"),
        ("TOP_P", "2", "(set by EDGEH2O_TOP_P)"),
        ("IGNORE_EOS", "maybe", "EDGEH2O_IGNORE_EOS='maybe': write 1 or 0"),
        ("CACHE_TYPE", "q1", "EDGEH2O_CACHE_TYPE: invalid choice: 'q1'"),
        ("BATCH_SIZE", "0", "(set by EDGEH2O_BATCH_SIZE)"),
    ],
)
def test_a_bad_value_names_the_variable(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    fragment: str,
) -> None:
    monkeypatch.setenv(f"EDGEH2O_{name}", value)
    assert main(["run", MODEL, "-p", "x"]) == 2
    stderr = capsys.readouterr().err
    assert fragment in stderr
    assert f"EDGEH2O_{name}" in stderr
    assert stderr.count("\n") == 1
    assert main(["run", MODEL, "-p", "x", *_flag(name)]) == 1


def _flag(name: str) -> list[str]:
    flag = "--" + name.lower().replace("_", "-")
    good = {"THREADS": ["1"], "TEMP": ["1"], "TOP_P": ["1"], "CACHE_TYPE": ["f16"]}
    good["BATCH_SIZE"] = ["256"]
    return [flag, *good.get(name, [])]


def test_the_rule_holds_for_every_flag_of_every_command() -> None:
    verbs = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for parser in verbs.choices.values():
        for action in filter(takes_value, parser._actions):
            assert any(flag.startswith("--") for flag in action.option_strings)
            assert environment_variable(action).removeprefix("EDGEH2O_").isupper()
    assert "EDGEH2O_CTX_SIZE" in build_parser().format_help()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("EDGEH2O_CTX_SIZES", "EDGEH2O_CTX_SIZE"),
        ("EDGEH2O_TREADS", "EDGEH2O_THREADS"),
        ("EDGEH2O_N_CTX", "EDGEH2O_CTX_SIZE"),  # by its name elsewhere
        ("EDGEH2O_CAHCE", "EDGEH2O_CACHE"),  # no flag
        ("EDGEH2O_PARALEL", "EDGEH2O_PARALLEL"),  # of another command
        ("EDGEH2O_XYZZY", ""),
    ],
)
def test_a_misspelt_variable_is_named(
    tiny_model: TinyModelFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    meant: str,
) -> None:
    """It was ignored silently."""
    monkeypatch.setenv(name, "2")
    assert main(["run", str(tiny_model()), "-p", "in", "-n", "1", "--quiet"]) == 0
    hint = f" (did you mean {meant}?)" if meant else ""
    assert capsys.readouterr().err == (
        f"edgeh2o: warning: this variable is not known, and ignored: {name}{hint}; it stands for "
        "no flag of any command\n"
    )


def test_all_misspelt_variables_take_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEH2O_TREADS", "2")
    monkeypatch.setenv("EDGEH2O_TMEP", "2")
    assert main(["run", MODEL, "-p", "x"]) == 1
    warning, error = capsys.readouterr().err.splitlines()
    assert "EDGEH2O_TMEP (did you mean EDGEH2O_TEMP?), EDGEH2O_TREADS (did you" in warning
    assert error.startswith("edgeh2o: error: ")


def test_known_variables_bring_no_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other commands, of no flag, of tests and builds."""
    for name in ("EDGEH2O_PARALLEL", "EDGEH2O_CACHE", *OTHER_VARIABLES):
        monkeypatch.setenv(name, "1")
    assert main(["run", MODEL, "-p", "x"]) == 1
    assert "warning" not in capsys.readouterr().err


def test_every_variable_of_the_sources_is_known() -> None:
    root = Path(edgeh2o.__file__).parents[1]
    files = [root / "setup.py", root / ".ci" / "run"]
    for folder, kinds in {"edgeh2o": ("py",), "cpp": ("cc", "h"), "tools": ("py",)}.items():
        files += [path for kind in kinds for path in (root / folder).rglob(f"*.{kind}")]
    named = {
        name.rstrip("_")
        for path in files
        for name in re.findall(r"\bEDGEH2O_[A-Z0-9_]*[A-Z0-9]\b", path.read_text("utf-8"))
    }
    assert {"EDGEH2O_CACHE", "EDGEH2O_LIBCUDA", "EDGEH2O_ISAS"} <= named
    assert named <= variables_of(build_parser()) | VARIABLES.keys() | OTHER_VARIABLES


def test_a_run_heeds_the_environment(
    tiny_model: TinyModelFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGEH2O_MAX_TOKENS", "3")
    monkeypatch.setenv("EDGEH2O_THREADS", "1")
    model = str(tiny_model(tensor_type="Q4_0"))
    assert main(["run", model, "-p", "in", "--json", "--ignore-eos"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["generated_tokens"], values["threads"]) == (3, 1)

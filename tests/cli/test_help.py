"""What a newcomer sees: help, and errors that name what was meant."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from edgeh2o.cli.main import VERBS, build_parser, main
from edgeh2o.errors import UsageError

SCREEN_LINES, COLUMNS = 24, "80"


def _parser_of(verb: str) -> argparse.ArgumentParser:
    (verbs,) = (a for a in build_parser(verb)._actions if isinstance(a.choices, dict))
    parser: argparse.ArgumentParser = verbs.choices[verb]
    return parser


def _examples(text: str) -> list[list[str]]:
    found = re.findall(r"^  (?:cat \S+ \| )?edgeh2o (.*?)(?: {3,}.*| > \S+|\)\s*)?$", text, re.M)
    return [shlex.split(line) for line in found]


@pytest.mark.parametrize("verb", VERBS)
def test_the_first_screen_of_a_verb_has_examples_that_parse(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", COLUMNS)
    lines = _parser_of(verb).format_help().splitlines()
    assert lines[0].startswith(f"usage: edgeh2o {verb}") and lines[1] == ""
    examples = _examples("\n".join(lines[:SCREEN_LINES]))
    assert examples
    for words in examples:
        assert words[0] == verb
        assert callable(build_parser().parse_args(words).execute)
    assert max(map(len, lines[:SCREEN_LINES])) <= int(COLUMNS)


def test_the_help_lists_every_command_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", COLUMNS)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert tuple(re.findall(r"^  ([a-z][a-z-]+)(?: {2,}|$)", text, re.M)) == VERBS
    assert all(words[0] in VERBS for words in _examples(text))
    assert main([]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", text)


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["help"], "usage: edgeh2o COMMAND ..."),
        (["help", "run"], "usage: edgeh2o run MODEL [flags]"),
        (["help", "quantize"], "usage: edgeh2o quantize IN OUT.gguf TYPE [flags]"),
        (["version"], "edgeh2o "),
    ],
)
def test_words_in_the_place_of_flags(
    words: list[str], start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(start)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("runn m.gguf", "there is no command 'runn' (did you mean run?)"),
        ("Server", "there is no command 'Server' (did you mean serve?)"),
        ("generate", "(did you mean run?)"),
        ("download", "(did you mean pull?)"),
        ("export_onnx", "(did you mean export-onnx?)"),
        ("m.gguf -p hi", "'m.gguf' is no command; a model comes after one, as in 'edgeh2o run MO"),
        ("smollm2-135m", "a model comes after one, as in 'edgeh2o chat MODEL'"),
        ("-m m.gguf -p hi", "a command comes before -m, as in 'edgeh2o run -m ...'"),
        ("-m m.gguf", "as in 'edgeh2o chat -m ...'"),
        ("--port=80 -m m.gguf", "as in 'edgeh2o serve --port=80 ...'"),
        (
            "run m -p a --context 9",
            "unrecognized arguments: --context 9 (did you mean --ctx-size?)",
        ),
        ("run m -p a --max_new_tokens=9", "(did you mean --max-tokens?)"),
        ("run m -p a --repetition-penalty 1", "(did you mean --repeat-penalty?)"),
        ("run m -p a --draft-model d", "(did you mean --draft?)"),
        ("run m -p a -temp 0", "unrecognized arguments: -temp (did you mean --temp?)"),
        ("run m -p a -seed=1", "unrecognized arguments: -seed=1 (did you mean --seed?)"),
        ("run m -p a -cl", "unrecognized arguments: -cl; see 'edgeh2o run --help'"),
        ("run m -p a --usable", "unrecognized arguments: --usable; see 'edgeh2o run --help'"),
        ("run m -p a --top-pp 1", "(did you mean --top-p?)"),
        ("chat m -p hi", "-p hi: 'edgeh2o run' answers a prompt; messages are typed or sent"),
        ("serve m -sys hi", "-sys hi: each conversation has its own system message"),
        ("run m -p a -nxyz", "unrecognized arguments: -nxyz; see 'edgeh2o run --help'"),
        ("run m -p a -x 1", "unrecognized arguments: -x 1; see 'edgeh2o run --help'"),
        ("needle m --max-new-tokens 3", "unrecognized arguments: --max-new-tokens 3; see"),
    ],
)
def test_what_was_meant_is_named(
    words: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == UsageError.exit_code
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_numbers_beside_their_flags_stay() -> None:
    args = build_parser().parse_args(["run", "m", "-p", "a", "-n3", "-t2", "-s7"])
    assert (args.max_tokens, args.threads, args.seed) == (3, 2, 7)

"""The examples run, the commands parse, the tables are those of the sources."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeh2o import HeadwiseConfig
from edgeh2o.cli.ablate import parse_grid
from edgeh2o.cli.main import build_parser
from edgeh2o.cli.model_options import read_model_options
from edgeh2o.evaluation.ablation import expand_grid
from tests.tiny_models import TinyModelFactory
from tools import write_docs

ROOT = Path(__file__).parents[2]
DEFAULT_MODEL = "smollm2-135m"


def _blocks(name: str, language: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _python_blocks() -> Iterator[object]:
    for name in ("README.md", "docs/python-api.md"):
        for number, code in enumerate(_blocks(name, "python"), 1):
            yield pytest.param(code, id=f"{name} {number}")


def _commands() -> Iterator[str]:
    """Each ``edgeh2o`` command of the shell examples, without redirections."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in _blocks(str(path.relative_to(ROOT)), "bash"):
            yield from re.findall(r"(?:^|\| |&& |bin/)(edgeh2o [^|>\n]*)", block, re.MULTILINE)


@pytest.mark.parametrize("code", list(_python_blocks()))
def test_python_examples_run(
    code: str,
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a tiny model in the place of the default one."""
    monkeypatch.chdir(tmp_path)
    model = tiny_model(tensor_type="Q4_0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exec(compile(code.replace(DEFAULT_MODEL, str(model)), "example", "exec"), {})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", list(_commands()))
def test_shell_examples_parse(command: str) -> None:
    words = shlex.split(command, comments=True)
    assert words[0] == "edgeh2o"
    args = build_parser().parse_args(words[1:])
    assert callable(args.execute)
    if "attention_config" in args:
        options = read_model_options(args)
        if "grid" in args:
            expand_grid(options.attention, 1024, parse_grid(args.grid, options.attention))


def test_files_of_settings_are_read(tmp_path: Path) -> None:
    (content,) = _blocks("docs/usage.md", "yaml")
    (tmp_path / "attention.yaml").write_text(content)
    command = ["run", "m.gguf", "-p", "x", "--attention-config", str(tmp_path / "attention.yaml")]
    attention = read_model_options(build_parser().parse_args(command)).attention
    assert attention == HeadwiseConfig(budget=640, local=128, max_past=4096)


def test_every_verb_has_an_example() -> None:
    shown = {command.split()[1] for command in _commands()}
    assert shown >= write_docs.list_verbs().keys()


def test_tables_are_those_of_the_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert write_docs.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_table_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(write_docs, "DOCS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- cache_types: written by tools/write_docs.py -->\nold\n<!-- end -->\nb\n"
    )
    assert write_docs.main(["--check"]) == 1
    assert "stale: page.md; run python -m tools.write_docs" in capsys.readouterr().err
    assert "old" in page.read_text()
    assert write_docs.main([]) == 0
    assert "old" not in page.read_text()
    assert "`f16`" in page.read_text()
    assert write_docs.main(["--check"]) == 0


def test_no_flag_of_a_verb_is_left_out() -> None:
    text = write_docs.write_flags()
    for verb, parser in write_docs.list_verbs().items():
        assert re.search(rf"\*\*[^*]*\b{verb}\b", text) or len(parser._actions) == 1
        for action in parser._actions:
            for flag in action.option_strings:
                assert action.dest == "help" or f"`{flag}`" in text

"""The examples run, the commands parse, the tables are those of the sources."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from edgeh2o import HeadwiseConfig, _core, isa
from edgeh2o.cli.ablate import parse_grid
from edgeh2o.cli.main import build_parser
from edgeh2o.cli.model_options import read_model_options
from edgeh2o.evaluation.ablation import expand_grid
from edgeh2o.models import registered_architectures
from tests.tiny_models import TinyModelFactory
from tools import write_docs

ROOT = Path(__file__).parents[2]
DEFAULT_MODEL = "smollm2-135m"
PAGES_OF_SOURCES = (
    "docs/architecture.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "bench/README.md",
    "docs/devices.md",
)
SOURCE_FOLDERS = ("edgeh2o", "cpp", "tools", "bench", "tests")
SOURCE_SUFFIXES = (".py", ".pyx", ".pxd", ".pyi", ".h", ".cc", ".c", ".md", ".toml")


def _blocks(name: str, language: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _quoted_file(code: str) -> Path | None:
    """The file that a block names in its first line, if it is a part of one."""
    found = re.match(r"(?:#|//) ([\w./]+)\n", code)
    path = ROOT / found[1] if found else None
    return path if path and path.exists() else None


def _python_blocks() -> Iterator[object]:
    for name in ("README.md", "docs/python-api.md", "docs/architecture.md"):
        for number, code in enumerate(_blocks(name, "python"), 1):
            if _quoted_file(code) is None:
                yield pytest.param(code, id=f"{name} {number}")


def _commands() -> Iterator[str]:
    """Each ``edgeh2o`` command of shell examples, without redirections, and of the text."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in _blocks(str(path.relative_to(ROOT)), "bash"):
            yield from re.findall(r"(?:^|\| |&& |bin/)(edgeh2o [^|>\n]*)", block, re.MULTILINE)
        text = path.read_text(encoding="utf-8")
        yield from re.findall(r"`(edgeh2o \w+ model\.gguf[^`\n]*)`", text)


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


def test_the_readme_names_all_that_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What runs")[2]
    names = {*registered_architectures(), *_core.supported_types(), *isa.available()}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()


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


@cache
def _names_of_sources() -> frozenset[str]:
    """All words of the sources; of names of types those that are defined or quoted."""
    paths = [ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    for folder in SOURCE_FOLDERS:
        paths += [p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in SOURCE_SUFFIXES]
    names = set()
    for path in paths:
        if Path(__file__).parent not in path.parents:
            text = path.read_text(encoding="utf-8")
            names.update(word for word in re.findall(r"\w+", text) if not _is_type(word))
            names.update(re.findall(r"\b(?:class|struct) (\w+)", text))
            names.update(re.findall(r"""["'](\w+)["']""", text))
            names.update(re.findall(r"^(\w+).* = ", text, re.MULTILINE))
    return frozenset(names)


def _is_type(word: str) -> bool:
    return re.fullmatch(r"[A-Z]+[a-z]\w*", word) is not None


def _file_exists(name: str) -> bool:
    """From the root, the package or cpp/, or anywhere if it has no folder; x stands for a name."""
    braces = re.search(r"\{([^}]*)\}", name)
    if braces:
        head, tail = name[: braces.start()], name[braces.end() :]
        return all(_file_exists(head + part + tail) for part in braces[1].split(","))
    pattern = re.sub(r"(?<![A-Za-z0-9])x(?=\.)|(?<=_)x(?=\.)", "*", name.rstrip("/"))
    if "/" in name:
        return any(any((ROOT / base).glob(pattern)) for base in ("", "edgeh2o", "cpp"))
    return any(any((ROOT / base).glob(f"**/{pattern}")) for base in SOURCE_FOLDERS) or any(
        ROOT.glob(pattern)
    )


def _find_stale_words(text: str) -> list[str]:
    """What stands in backticks, looks like a file, module or name of the sources, and is none."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    stale = []
    for word in re.findall(r"`([^`\n]+)`", text):
        module = re.match(r"python -m ([\w.]+)", word)
        if module:
            is_known = _file_exists(module[1].replace(".", "/") + ".py") or "." not in module[1]
        elif re.fullmatch(r"[\w.*{}][\w.*{},/-]*", word) and (
            "/" in word or word.endswith(SOURCE_SUFFIXES)
        ):
            is_known = _file_exists(word)
        elif re.fullmatch(r"\w+(?:(?:::|\.)\w+)*(?:[=(].*)?", word):
            names = re.findall(r"\w+", re.split(r"[=(]", word)[0])
            names = [name for name in names if not name.islower() or "_" in name]
            is_known = _names_of_sources().issuperset(names)
        else:
            is_known = True
        if not is_known:
            stale.append(word)
    return stale


@pytest.mark.parametrize("page", PAGES_OF_SOURCES)
def test_files_and_names_of_the_sources_exist(page: str) -> None:
    assert _find_stale_words((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "word",
    [
        "cpp/sparse/no_such.cc",
        "cpp/no_folder/x.cc",
        "model/mixers/attention.{h,py}",
        "no_such_file.py",
        "python -m tools.no_such",
        "NoSuchClass",
        "Decoder::no_such_function",
        "EDGEH2O_NO_SUCH=1",
    ],
)
def test_stale_files_and_names_are_found(word: str) -> None:
    assert _find_stale_words(f"See `setup.py`, `{word}` and `Decoder`.") == [word]


def test_quotations_are_those_of_the_sources() -> None:
    """All C++, and what Python begins with the name of a file."""
    n_quotations = 0
    for page in PAGES_OF_SOURCES:
        for language in ("python", "cpp"):
            for code in _blocks(page, language):
                path = _quoted_file(code)
                if path is not None or language == "cpp":
                    n_quotations += 1
                    assert path is not None, code
                    assert code.partition("\n")[2] in path.read_text(encoding="utf-8"), path
    assert n_quotations > 0

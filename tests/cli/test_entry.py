"""The process's entry point: what happens before there is a command line to run."""

import argparse
import subprocess
import sys

import pytest

from edgeh2o.cli.main import VERBS, build_parser

# Ctrl-C while a module is imported, at the same place each time.
INTERRUPTED_IMPORT = """
import runpy, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv = ["edgeh2o", "run", "no.gguf", "-p", "x"]
runpy.run_module("edgeh2o", run_name="__main__")
"""


@pytest.mark.parametrize("name", ["edgeh2o.cli.main", "argparse", "edgeh2o.cli.run", "edgeh2o.llm"])
def test_ctrl_c_while_modules_are_imported(name: str) -> None:
    script = INTERRUPTED_IMPORT.format(name=name)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "edgeh2o: interrupted\n"


# Ctrl-C in a callback of a weak reference, as importlib has them, whose exceptions are dropped.
INTERRUPTED_CALLBACK = """
import runpy, signal, sys, time, weakref

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "edgeh2o.cli.run":
            thing = Interrupt()
            reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
            del thing
            time.sleep(60)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["edgeh2o", "run", "no.gguf", "-p", "x"]
runpy.run_module("edgeh2o", run_name="__main__")
"""


def test_ctrl_c_where_python_drops_it() -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_CALLBACK],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "edgeh2o: interrupted\n"


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_alone_is_the_verb_among_all(verb: str) -> None:
    every = _verbs(build_parser())
    assert tuple(every) == VERBS
    alone = _verbs(build_parser(verb))
    assert tuple(alone) == (VERBS if verb == "completion" else (verb,))
    assert alone[verb].format_help() == every[verb].format_help()


@pytest.mark.parametrize("first", ["--help", "no-such-verb", ""])
def test_what_is_no_verb_gets_them_all(first: str) -> None:
    assert tuple(_verbs(build_parser(first))) == VERBS


def test_a_run_imports_no_other_verb() -> None:
    script = (
        "import sys\nfrom edgeh2o.cli.main import main\n"
        "main(['run', 'no.gguf', '-p', 'x'])\n"
        "print([name for name in sys.modules if name.startswith('edgeh2o.cli.')])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "edgeh2o.cli.run" in result.stdout
    assert "edgeh2o.cli.ablate" not in result.stdout

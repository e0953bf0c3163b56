"""The package's face: names resolve, and looking at it loads nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import edgeh2o

HEAVY = (
    "numpy",
    "tokenizers",
    "rich",
    "psutil",
    "gguf",
    "jinja2",
    "matplotlib",
    "edgeh2o._core",
    "edgeh2o.llm",
)


@pytest.mark.parametrize("name", edgeh2o.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(edgeh2o, name) is not None
    assert name in dir(edgeh2o)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = edgeh2o.Llm


def test_building_the_parser_imports_nothing_heavy() -> None:
    script = (
        "import sys, edgeh2o\n"
        "from edgeh2o.cli.main import build_parser\n"
        "build_parser().format_help()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({}, ["10000", None]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", None]),
        ({"OMP_WAIT_POLICY": "active"}, [None, "active"]),
    ],
)
def test_waiting_threads_spin_briefly_unless_the_user_says_otherwise(
    theirs: dict[str, str], expected: list[str | None]
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    script = f"import edgeh2o, json, os; print(json.dumps([os.environ.get(n) for n in {names}]))"
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment | theirs, capture_output=True, check=True
    )
    assert json.loads(result.stdout) == expected

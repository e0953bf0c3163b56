"""What the package promises, what the workflows do and what the repository holds agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgeh2o import __version__

tomllib = pytest.importorskip("tomllib", reason="CPython 3.10 has no reader of TOML")

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm"}
MACS = {"macos-14", "macos-15-intel"}  # arm64, x86-64
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def versions_promised() -> list[str]:
    prefix = "Programming Language :: Python :: 3."
    classifiers = PROJECT["project"]["classifiers"]
    return [f"3.{name[len(prefix) :]}" for name in classifiers if name.startswith(prefix)]


def load(path: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text("ascii"))
    return workflow


def jobs() -> list[Any]:
    return [
        pytest.param(load(path), job, id=f"{path.stem}-{name}")
        for path in WORKFLOWS
        for name, job in load(path)["jobs"].items()
    ]


def steps(job: dict[str, Any], key: str) -> list[str]:
    return [step[key] for step in job["steps"] if key in step]


def test_versions_of_python_are_the_same_everywhere() -> None:
    promised = versions_promised()
    oldest, newest = (int(version[2:]) for version in (promised[0], promised[-1]))
    assert promised == [f"3.{minor}" for minor in range(oldest, newest + 1)]
    assert PROJECT["project"]["requires-python"] == f">=3.{oldest}"
    built = PROJECT["tool"]["cibuildwheel"]["build"].split()
    assert built == [f"cp3{version[2:]}-*" for version in promised]
    checked = load(ROOT / ".github/workflows/ci.yml")["jobs"]["check"]["strategy"]["matrix"]
    assert checked["python"] == [promised[0], promised[-1]]


def test_both_architectures_are_checked_and_built() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "macos", "wheels"}
    for path, job, runners in (
        ("ci", "check", RUNNERS),
        ("macos", "check", MACS),
        ("wheels", "wheels", RUNNERS),
    ):
        chosen = load(ROOT / f".github/workflows/{path}.yml")["jobs"][job]
        assert set(chosen["strategy"]["matrix"]["os"]) == runners
    images = PROJECT["tool"]["cibuildwheel"]["linux"]
    assert images["manylinux-x86_64-image"] == images["manylinux-aarch64-image"]


@pytest.mark.parametrize(("workflow", "job"), jobs())
def test_a_job_is_bounded_and_may_do_little(workflow: dict[str, Any], job: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert "cancel-in-progress" in workflow["concurrency"]
    assert job["timeout-minutes"] <= 180
    assert job["runs-on"] in {*RUNNERS, "${{ matrix.os }}"}
    for action in steps(job, "uses"):
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", action)
    if "permissions" in job:
        assert job["if"] == "github.ref_type == 'tag'"


def test_what_the_jobs_name_exists() -> None:
    scripts = [script for param in jobs() for script in steps(param.values[1], "run")]
    named = re.findall(r"(?<![\w/.])(?:\.ci|tools|tests|examples)/[\w./]*", "\n".join(scripts))
    assert ".ci/run" in named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_macs_run_what_the_readme_says() -> None:
    scripts = steps(load(ROOT / ".github/workflows/macos.yml")["jobs"]["check"], "run")
    (command,) = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert command in scripts
    assert "brew install libomp" in scripts


def test_ci_runs_what_contributors_run() -> None:
    check = load(ROOT / ".github/workflows/ci.yml")["jobs"]["check"]
    command = steps(check, "run")[-1]
    assert command == "bash .ci/run"
    assert f"`{command}` must pass" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_wheels_are_tested_with_what_exists() -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    folders = [word for word in settings["test-command"].split() if word.startswith("tests/")]
    assert folders
    for path in (*settings["test-sources"], *folders):
        assert (ROOT / path).exists(), path
    assert set(settings["test-extras"]) <= set(PROJECT["project"]["optional-dependencies"])


def test_the_changelog_has_this_version_and_room_for_the_next() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("ascii"), re.M)
    assert headings[:2] == ["Unreleased", __version__]


def test_papers_are_in_the_sdist_and_named_to_contributors() -> None:
    included = (ROOT / "MANIFEST.in").read_text("ascii").split()
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for name in ("CHANGELOG.md", "SECURITY.md"):
        assert name in included
        assert name in contributing


def test_the_security_paper_names_every_fuzz_target() -> None:
    paper = (ROOT / "SECURITY.md").read_text("ascii")
    for target in (ROOT / "tools").glob("fuzz_*.py"):
        assert target.stem == "fuzz_loop" or f"tools/{target.name}" in paper

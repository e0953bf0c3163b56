"""The stand-alone comparison of all kernels with plain loops, on this machine.

``tools/cross_check_aarch64.py`` runs the same program under emulation.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeh2o import isa
from tests.native_build import archives_of, compiler, find_objects, openmp_flags, run

SOURCES = sorted((Path(__file__).parent / "selftest").glob("*.cc"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    objects = find_objects()
    target = tmp_path_factory.mktemp("selftest") / "kernel_selftest"
    openmp, libraries = openmp_flags()
    flags = ["-std=c++17", "-O1", *openmp, "-Icpp", "-I."]
    linked = [*map(str, SOURCES), *archives_of(objects), *libraries, "-ldl"]
    run([*compiler(), *flags, *linked, "-o", str(target)])
    return target


def test_it_has_the_tables_of_the_package(program: Path) -> None:
    *tables, active = run([str(program), "--list"]).splitlines()
    assert tables == list(isa.available())
    assert active == f"active: {isa.active()}"


def test_every_item_of_a_loop_has_its_turn(program: Path) -> None:
    assert run([str(program), "--threads"]) == ""


@pytest.mark.parametrize("table", isa.available())
def test_kernels_equal_plain_loops(program: Path, table: str) -> None:
    lines = run([str(program), table]).splitlines()
    found = [re.fullmatch(r"(\S+) +\S.*? +(ok|absent)( .*)?", line) for line in lines]
    assert all(found), lines
    assert {line[1] for line in found if line} == {table}
    assert sum(line[2] == "ok" for line in found if line) > 20

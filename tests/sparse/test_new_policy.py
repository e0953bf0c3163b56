"""A new policy is one C++ file and one Python file: both are added to a copy of the package."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

import edgeh2o
from tests.native_build import (
    MODULE_FLAGS,
    ROOT,
    archives_of,
    compiler,
    find_objects,
    openmp_flags,
    run,
)
from tests.tiny_models import TinyModelFactory

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from, with the package and the two files."""
    folder = tmp_path_factory.mktemp("with_a_new_policy")
    objects = find_objects()
    source, target = HERE / "every_other.cc", folder / "every_other.o"
    openmp, libraries = openmp_flags()
    flags = ["-std=c++17", "-O1", "-fPIC", *openmp, "-fvisibility=hidden", "-Icpp"]
    run([*compiler(), *flags, "-c", str(source), "-o", str(target)])
    installed = Path(edgeh2o.__file__).parent
    shutil.copytree(
        installed, folder / "edgeh2o", ignore=shutil.ignore_patterns("__pycache__", "*.cpp")
    )
    shutil.copy(HERE / "every_other.py", folder / "edgeh2o" / "attention")
    core = folder / "edgeh2o" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    core.unlink(missing_ok=True)
    parts = sorted(objects.glob("build/joined/bindings_*.o"))
    linked = [*map(str, parts), str(target), *archives_of(objects)]
    run([*compiler(), *MODULE_FLAGS, *linked, *libraries, "-o", str(core)])
    return folder


def test_it_runs_from_the_command_line(package: Path, tiny_model: TinyModelFactory) -> None:
    model, prompt = tiny_model(tensor_type="F32"), package / "prompt.txt"
    prompt.write_text("a long enough text " * 40)

    def answer(*attention: str) -> dict[str, object]:
        flags = ["-n", "4", "--temp", "0", "-ub", "64", "--no-chat", "--json", "--attention"]
        command = [sys.executable, "-m", "edgeh2o", "run", str(model), "-f", str(prompt), *flags]
        result: dict[str, object] = json.loads(run([*command, *attention], package))
        return result

    sparse = answer("every_other", "--every-other-step", "3")
    assert sparse["attention"] == {"algorithm": "every_other", "step": 3}
    dense, everything = answer("dense"), answer("every_other", "--every-other-step", "1")
    assert int(str(sparse["pairs_computed"])) < int(str(dense["pairs_computed"]))
    for name in ("pairs_computed", "token_ids"):
        assert everything[name] == dense[name]


def test_no_other_file_names_a_policy() -> None:
    """What ships is found the same way: no list of policies to extend."""
    for name in ("h2o", "headwise"):
        own = {f"{name}_policy.cc", f"{name}_policy.h", f"{name}.py"}
        for path in [*ROOT.glob("cpp/**/*.cc"), *ROOT.glob("cpp/**/*.h")]:
            assert path.name in own or f"{name}_policy.h" not in path.read_text(), path
    assert "_policy" not in (ROOT / "setup.py").read_text()

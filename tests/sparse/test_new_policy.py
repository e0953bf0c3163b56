"""A new policy is one C++ file and one Python file: both are added to a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import edgeh2o
from tests.tiny_models import TinyModelFactory

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


def find_objects() -> Path:
    """Where the objects of a core lie: in ``EDGEH2O_OBJECTS``, or in a folder of build/."""
    if named := os.environ.get("EDGEH2O_OBJECTS"):
        return ROOT / named
    for folder in sorted(ROOT.glob(f"build/temp.*{sys.implementation.cache_tag}")):
        if any(folder.glob("cpp/bindings/*.o")) and any(folder.glob("*.a")):
            return folder
    pytest.skip("needs the objects of a build in build/, which an installation by pip may remove")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from, with the package and the two files."""
    folder = tmp_path_factory.mktemp("with_a_new_policy")
    objects = find_objects()
    compiler = os.environ.get("CXX", "c++").split()
    source, target = HERE / "every_other.cc", folder / "every_other.o"
    flags = ["-std=c++17", "-O1", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Icpp"]
    run([*compiler, *flags, "-c", str(source), "-o", str(target)])
    installed = Path(edgeh2o.__file__).parent
    shutil.copytree(
        installed, folder / "edgeh2o", ignore=shutil.ignore_patterns("__pycache__", "*.cpp")
    )
    shutil.copy(HERE / "every_other.py", folder / "edgeh2o" / "attention")
    core = folder / "edgeh2o" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    core.unlink(missing_ok=True)
    parts = sorted(objects.glob("cpp/bindings/*.o")) + sorted(objects.glob("cpp/sparse/*.o"))
    archives = sorted(objects.glob("*.a"))
    group = ["-Wl,--start-group", *map(str, archives), "-Wl,--end-group"]
    run([*compiler, "-shared", *map(str, parts), str(target), *group, "-fopenmp", "-o", str(core)])
    return folder


def run(command: list[str], cwd: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(cwd)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


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

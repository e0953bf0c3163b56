"""The packages that ONNX models need, by version and by name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeh2o import LLM
from edgeh2o.errors import UsageError
from edgeh2o.onnx import packages
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import SMALL
from tests.tiny_models import TinyModelFactory

_TELEMETRY = "ORT_DISABLE_TELEMETRY"


@pytest.mark.parametrize("version", ["1.19.2", "1.22.1"])
def test_old_onnxruntime_is_refused(
    version: str, onnx_model: OnnxModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    folder = onnx_model(**SMALL)
    monkeypatch.setattr(onnxruntime, "__version__", version)
    with pytest.raises(UsageError, match=f"onnxruntime {version} is too old.*1.19.*wrong"):
        LLM(folder)


@pytest.mark.parametrize("version", ["1.23.0", "1.31.1", "2.0.0"])
def test_newer_onnxruntime_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", version)
    packages.require_runtime()


def test_nothing_is_sent_of_what_is_run(tmp_path: Path) -> None:
    """Wheels of onnxruntime that would leave an id in the folder of temporary files."""
    variables = {name: value for name, value in os.environ.items() if name != _TELEMETRY}
    script = f"import edgeh2o.onnx.packages, os; print(os.environ[{_TELEMETRY!r}])"
    for given, expected in (({}, "1"), ({_TELEMETRY: "0"}, "0")):
        result = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env=variables | {"TMPDIR": str(tmp_path)} | given,
        )
        assert result.stdout == f"{expected}\n"
        assert given or list(tmp_path.iterdir()) == []


def test_no_script_imports_onnxruntime_by_itself() -> None:
    """Those of bench and tools did, and had it send what they ran."""
    root = Path(packages.__file__).parents[2]
    found = []
    for folder in ("edgeh2o", "bench", "tools", "examples"):
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            at_run_time = re.sub(r"(?m)^if TYPE_CHECKING:\n(?:(?: .*)?\n)+", "", text)
            for node in ast.walk(ast.parse(at_run_time)):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                if any(name.partition(".")[0].startswith("onnxruntime") for name in names):
                    found.append(path.relative_to(root).as_posix())
    assert found == ["edgeh2o/onnx/packages.py"]


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_missing_packages_are_named(
    package: str, onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    """Not installed: the cure is named where one is needed, and nothing else needs it."""
    code = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "from edgeh2o.cli.main import main; sys.exit(main(sys.argv[2:]))"
    )

    def run(*arguments: object) -> Any:
        command = [sys.executable, "-c", code, package, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    ran = run("run", onnx_model(**SMALL), "-p", "x", "-n", "1")
    if package == "onnx":  # only what writes models needs it
        assert ran.returncode == 0, ran.stderr
    else:
        assert ran.returncode == 2 and "pip install 'edgeh2o[onnx]'" in ran.stderr
    written = run("export-onnx", tiny_model(**SMALL), tmp_path / "new")
    if package == "onnx":
        assert written.returncode == 2 and "pip install 'edgeh2o[onnx]'" in written.stderr
    else:
        assert written.returncode == 0, written.stderr
    assert run("run", tiny_model(**SMALL), "-p", "x", "-n", "1").returncode == 0

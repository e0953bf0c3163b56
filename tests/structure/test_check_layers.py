"""The layer ladder holds, and the check sees every kind of violation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeh2o.attention.registry import sparse_attention_algorithms
from tools.check_layers import CPP_FOLDERS, check_cpp, check_others, check_python, main

REPOSITORY = Path(__file__).resolve().parents[2]


def write(root: Path, name: str, *lines: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_this_repository_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(REPOSITORY)])
    assert capsys.readouterr().out == ""
    assert code == 0


def test_only_its_own_files_name_an_algorithm() -> None:
    names = "|".join(set(sparse_attention_algorithms()) - {"dense"})  # which is a word of its own
    layers = ("base", "quant", "simd", "kernels", "isa", "ops", "sequence", "model", "cuda")
    sources = [path for layer in layers for path in (REPOSITORY / "cpp" / layer).rglob("*.*")]
    assert len(sources) > 100
    naming = [
        str(path)
        for path in sources
        if path.suffix in {".h", ".cc", ".cuh"}
        and re.search(rf"(?i)\b({names})(?![a-z])", path.read_text(encoding="utf-8"))
    ]
    assert naming == []


def test_every_folder_of_the_sources_is_known() -> None:
    folders = {path.name for path in (REPOSITORY / "cpp").iterdir() if path.is_dir()}
    assert {"base", "kernels", "ops"} <= folders <= set(CPP_FOLDERS)


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("config.py", "from .llm import LLM"),
        ("config.py", "from . import _core"),
        ("config.py", "import edgeh2o.engine.stats"),
        ("formats/gguf.py", "from ..models.reader import read_model"),
        ("models/llama.py", "from edgeh2o.runners import native"),
        ("models/llama.py", "def load():\n    from ..tokenizer import bpe"),
        ("engine/generate.py", "from ..cli.run import main"),
        ("engine/generate.py", "from .. import LLM"),
        ("engine/_sampler.pyx", "from ..llm cimport LLM"),
        ("engine/_sampler.pyx", "import edgeh2o.cli"),
        ("tokenizer/_text.pxd", "from ..llm cimport LLM"),
        ("_core.pyi", "from .config import ModelConfig"),
        ("engine/generate.py", "from tools.make_tiny_model import write_tiny_model"),
        ("cli/run.py", "import bench.reporting"),
        ("cli/run.py", "def load():\n    from tests import tiny_models"),
    ],
)
def test_upward_imports_are_found(tmp_path: Path, module: str, statement: str) -> None:
    write(tmp_path, "edgeh2o/__init__.py")
    write(tmp_path, "edgeh2o/_core.pyi")
    write(tmp_path, f"edgeh2o/{module}", "import json", statement)
    (violation,) = check_python(tmp_path)
    assert violation.path == tmp_path / "edgeh2o" / module
    assert violation.line == (3 if "\n" in statement else 2)
    assert "must not import" in violation.message


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("__main__.py", "from .cli import main"),
        ("cli/run.py", "from edgeh2o import __version__"),
        ("cli/run.py", "from ..llm import LLM"),
        ("cli/run.py", "from .flags import add_flags"),
        ("runners/native.py", "from .. import _core"),
        ("models/llama.py", "from ..formats.gguf import GgufFile"),
        ("engine/_sampler.pyx", "from libc.math cimport exp"),
        ("engine/_sampler.pyx", "from ..config import SamplingParams"),
        ("config.py", "from .errors import UsageError"),
    ],
)
def test_downward_imports_pass(tmp_path: Path, module: str, statement: str) -> None:
    write(tmp_path, "edgeh2o/_core.pyi")
    write(tmp_path, f"edgeh2o/{module}", statement)
    assert check_python(tmp_path) == []


def test_a_module_outside_the_ladder_is_found(tmp_path: Path) -> None:
    write(tmp_path, "edgeh2o/helpers/text.py")
    write(tmp_path, "edgeh2o/llm.py", "from .helpers import text")
    messages = [violation.message for violation in check_python(tmp_path)]
    assert messages == ["helpers has no place in the ladder"] * 2


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("base/arena.h", '#include "ops/matmul.h"'),
        ("quant/pack.cc", '#include "isa/kernel_table.h"'),
        ("sparse/h2o.cc", '#include "quant/pack.h"'),
        ("ops/matmul.cc", '#include "../model/weights.h"'),
        ("ops/matmul.cc", '#  include "cuda/stream.h"'),
        ("ops/matmul.cc", '#include "missing.h"'),
        ("kernels/norm-inl.h", "#include <vector>"),
        ("kernels/norm-inl.h", '#include "base/check.h"'),
        ("kernels/norm-inl.h", '#include "quant/pack.h"'),
        ("ops/matmul.cc", "#pragma omp parallel for"),
        ("kernels/norm-inl.h", '  _Pragma("omp simd")'),
        ("extra/thing.h", ""),
    ],
)
def test_cpp_violations_are_found(tmp_path: Path, source: str, line: str) -> None:
    for header in ("ops/matmul.h", "isa/kernel_table.h", "quant/pack.h", "model/weights.h"):
        write(tmp_path, f"cpp/{header}")
    for header in ("cuda/stream.h", "base/check.h"):
        write(tmp_path, f"cpp/{header}")
    write(tmp_path, f"cpp/{source}", line)
    (violation,) = check_cpp(tmp_path)
    assert str(violation).startswith(f"{tmp_path / 'cpp' / source}:1: ")


def test_cpp_includes_downward_pass(tmp_path: Path) -> None:
    write(tmp_path, "cpp/base/parallel.h", "#include <omp.h>", "#pragma omp parallel")
    write(tmp_path, "cpp/simd/simd_avx2.h", "#include <immintrin.h>")
    write(tmp_path, "cpp/quant/packed_format.h", "#include <cstdint>")
    write(
        tmp_path,
        "cpp/kernels/norm-inl.h",
        "#include <cstddef>",
        '#include "quant/packed_format.h"',
        '#include "exp-inl.h"',
    )
    write(tmp_path, "cpp/kernels/exp-inl.h")
    write(tmp_path, "cpp/cuda/stream.h")
    write(tmp_path, "cpp/ops/matmul_cuda.cu", '#include "cuda/stream.h"')
    write(tmp_path, "cpp/sparse/h2o.cc", '#include "base/parallel.h"', "#include <vector>")
    assert check_cpp(tmp_path) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from .gguf import open_gguf",
        "from . import gguf",
        "def load():\n    from edgeh2o.formats import gguf",
        "if TYPE_CHECKING:\n    from .gguf import GgufFile",
    ],
)
def test_circles_of_imports_are_found(tmp_path: Path, statement: str) -> None:
    write(tmp_path, "edgeh2o/formats/__init__.py")
    write(tmp_path, "edgeh2o/formats/gguf.py", "from .metadata import Metadata")
    write(tmp_path, "edgeh2o/formats/metadata.py", "", "from .quote import quote")
    write(tmp_path, "edgeh2o/formats/quote.py", statement)
    write(tmp_path, "edgeh2o/formats/split.py", "from .gguf import open_gguf")
    (violation,) = check_python(tmp_path)
    assert violation.path == tmp_path / "edgeh2o/formats/quote.py"
    assert violation.line == statement.count("\n") + 1
    names = ("gguf", "metadata", "quote", "gguf")
    assert violation.message == "a circle: " + " > ".join(f"formats/{name}" for name in names)


def test_a_package_and_its_module_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path, "edgeh2o/tokenizer/__init__.py", "from .bpe import Bpe")
    write(tmp_path, "edgeh2o/tokenizer/bpe.py", "from . import Tokenizer")
    (violation,) = check_python(tmp_path)
    assert violation.message.endswith("tokenizer/__init__ > tokenizer/bpe > tokenizer/__init__")


def test_two_ways_to_one_module_are_no_circle(tmp_path: Path) -> None:
    write(tmp_path, "edgeh2o/engine/generate.py", "from . import prompt", "from . import stats")
    write(tmp_path, "edgeh2o/engine/prompt.py", "from .stats import Stats")
    write(tmp_path, "edgeh2o/engine/stats.py", "from ..config import SamplingParams")
    assert check_python(tmp_path) == []


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("tests/engine/test_lookup.py", "from tests.engine.test_stop import STOPS"),
        ("tests/engine/fakes.py", "def load():\n    from tests.engine import test_stop"),
        ("tests/engine/fakes.py", "from .test_stop import STOPS"),
        ("tools/fuzz_gguf.py", "import tests.engine.test_stop"),
        ("tools/fuzz_gguf.py", "from tests.engine.conftest import model"),
        ("bench/quality.py", "from tests.engine.fakes import CONFIG"),
        ("bench/cuda_cases/case.py", "from tests.engine import conftest"),
    ],
)
def test_imports_of_tests_are_found(tmp_path: Path, module: str, statement: str) -> None:
    for name in ("fakes", "test_stop", "conftest"):
        write(tmp_path, f"tests/engine/{name}.py")
    write(tmp_path, module, "import json", statement)
    (violation,) = check_others(tmp_path)
    assert violation.path == tmp_path / module
    assert violation.line == (3 if "\n" in statement else 2)
    assert "must not import" in violation.message


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("tests/engine/test_lookup.py", "from tests.engine.fakes import CONFIG"),
        ("tests/engine/test_lookup.py", "from tests.engine.conftest import model"),
        ("tests/engine/test_lookup.py", "from bench.quality import measure"),
        ("tests/engine/fakes.py", "from tools.cuda_driver import Device"),
        ("tools/fuzz_gguf.py", "from tests.engine import fakes"),
        ("tools/fuzz_gguf.py", "from edgeh2o.cli.main import main"),
        ("tools/update_goldens.py", "from bench.quality import measure"),
        ("bench/quality.py", "from tools.cuda_driver import Device"),
    ],
)
def test_imports_of_what_is_shared_pass(tmp_path: Path, module: str, statement: str) -> None:
    write(tmp_path, "tests/engine/conftest.py")
    write(tmp_path, "tests/engine/fakes.py")
    write(tmp_path, "tools/cuda_driver.py")
    write(tmp_path, "bench/quality.py")
    write(tmp_path, module, statement)
    assert check_others(tmp_path) == []


def test_a_circle_through_tools_and_tests_is_found(tmp_path: Path) -> None:
    write(tmp_path, "tests/tiny_models.py", "from tools.make_tiny_model import write")
    write(tmp_path, "tools/make_tiny_model.py", "from tests.families import FAMILIES")
    write(tmp_path, "tests/families.py", "", "from .tiny_models import MODELS")
    (violation,) = check_others(tmp_path)
    names = ("tests/families", "tests/tiny_models", "tools/make_tiny_model", "tests/families")
    assert str(violation) == f"{tmp_path}/tools/make_tiny_model.py:1: a circle: {' > '.join(names)}"


def test_circles_of_includes_are_found(tmp_path: Path) -> None:
    write(tmp_path, "cpp/base/span.h", "#include <cstddef>", '#include "base/check.h"')
    write(tmp_path, "cpp/base/check.h", '#include "span.h"')
    write(tmp_path, "cpp/base/check.cc", '#include "base/check.h"')
    (violation,) = check_cpp(tmp_path)
    assert str(violation) == (
        f"{tmp_path}/cpp/base/span.h:2: a circle: base/check.h > base/span.h > base/check.h"
    )


def test_exit_code_and_output_name_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "edgeh2o/config.py", "", "from . import llm")
    write(tmp_path, "edgeh2o/llm.py")
    write(tmp_path, "cpp/base/span.h", '#include "base/missing.h"', "#pragma omp for")
    write(tmp_path, "bench/quality.py", "import tests")
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{tmp_path}/edgeh2o/config.py:2: config must not import llm",
        f"{tmp_path}/bench/quality.py:1: bench must not import tests",
        f"{tmp_path}/cpp/base/span.h:2: OpenMP belongs in base/parallel",
    ]

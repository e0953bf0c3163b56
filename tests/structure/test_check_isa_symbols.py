"""Symbols of ISA objects: the check on names, and on objects made by the real compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.check_isa_symbols import Symbol, isa_of, known_isas, list_symbols, main, strays

REPOSITORY = Path(__file__).resolve().parents[2]
ISA_FOLDER = REPOSITORY / "cpp" / "isa"

CLEAN = """
namespace edgeh2o::scalar {
struct Tile { virtual ~Tile() = default; };
template <typename T> T twice(T x) { return x + x; }
float kernel(float x) { static Tile tile; auto f = [&](auto y) { return twice(y); }; return f(x); }
extern const int kTable; const int kTable = 3;
}
"""
STRAY = """
namespace edgeh2o {
inline __attribute__((noinline)) float shared(float x) { return x * x; }
namespace scalar { float kernel(float x) { return shared(x); } }
}
"""


def compile_object(directory: Path, name: str, source: str) -> Path:
    compiler = shutil.which("c++")
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("needs a C++ compiler and nm")
    (directory / f"{name}.cc").write_text(source, encoding="utf-8")
    out = directory / f"{name}.o"
    subprocess.run(
        [compiler, "-std=c++17", "-O2", "-c", str(directory / f"{name}.cc"), "-o", str(out)],
        check=True,
    )
    return out


def test_isas_come_from_the_sources() -> None:
    isas = known_isas(ISA_FOLDER)
    assert {"scalar", "avx2", "avxvnni", "avx512vnni", "neon", "neon_i8mm"} <= set(isas)
    assert isa_of(Path("build/libedgeh2o_neon_i8mm.a"), isas) == "neon_i8mm"
    assert isa_of(Path("neon.o"), isas) == "neon"
    assert isa_of(Path("libavx512vnni.a"), isas) is None
    assert isa_of(Path("libedgeh2o_base.a"), isas) is None


def test_names_inside_and_outside_the_namespace() -> None:
    inside = [
        "_ZN7edgeh2o4avx27add_f32EPfPKfm",
        "_ZZZN7edgeh2o4avx27gemv_q8EvENKUlT_E0_clEvENKUlS6_E0_clEv",
        "_ZTVN7edgeh2o4avx24TileE",
        "_ZGVZN7edgeh2o4avx26kernelEvE4tile",
        "_ZNK7edgeh2o4avx24Tile4sizeEv",
    ]
    outside = [
        "_ZSt4sqrtf",
        "_ZN7edgeh2o6scalar7add_f32EPfPKfm",
        "_ZN7edgeh2o5checkEv",
        "_ZNSt6vectorIN7edgeh2o4avx24TileEE4sizeEv",
        "edgeh2o_entry",
    ]
    symbols = [Symbol("W", name) for name in inside + outside]
    assert [symbol.name for symbol in strays(symbols, "avx2")] == outside


def test_clean_object_passes(tmp_path: Path) -> None:
    path = compile_object(tmp_path, "scalar", CLEAN)
    assert any(symbol.name.startswith("_ZTV") for symbol in list_symbols(path))
    assert main([str(path)]) == 0


def test_shared_inline_function_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = compile_object(tmp_path, "scalar", STRAY)
    assert main([str(path)]) == 1
    assert capsys.readouterr().out == (
        f"{path}: W _ZN7edgeh2o6sharedEf is outside edgeh2o::scalar\n"
    )


def test_files_that_cannot_be_checked_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "libbase.a")]) == 2
    assert "named for none" in capsys.readouterr().err
    (tmp_path / "avx2.o").write_text("not an object", encoding="utf-8")
    assert main([str(tmp_path / "avx2.o")]) == 2
    assert main([str(tmp_path / "avx2.o"), "--nm", "no-such-nm"]) == 2
    assert "no-such-nm" in capsys.readouterr().err

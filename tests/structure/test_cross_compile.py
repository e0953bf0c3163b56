"""The aarch64 build: compiles, dispatches by processor, and its kernels agree with plain loops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import cross_check_aarch64

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.first
def test_kernels_agree_under_emulation() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tools.cross_check_aarch64", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if result.returncode == cross_check_aarch64.SKIPPED:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr + result.stdout


def test_missing_programs_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert cross_check_aarch64.main([]) == cross_check_aarch64.SKIPPED
    message = capsys.readouterr().err
    assert "g++-aarch64-linux-gnu" in message
    assert "qemu-user" in message


def test_every_source_of_the_core_is_built() -> None:
    """An unnamed one is missing from the program, which then does not link."""
    units = cross_check_aarch64.read_units()
    sources = [path for unit in units for path in cross_check_aarch64.joined_sources(unit.source)]
    assert len(sources) == len(set(sources))
    for folder in ("base", "quant", "ops", "sparse", "sequence", "model"):
        paths = (ROOT / "cpp" / folder).rglob("*.cc")
        assert {str(path.relative_to(ROOT)) for path in paths} <= set(sources)


def test_objects_come_in_the_order_of_their_units(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others would go into the archive of another library, where the linker may pass them by."""

    def compile_unit(unit: cross_check_aarch64.Unit, build_dir: Path, _: object) -> Path:
        return build_dir / Path(unit.source).with_suffix(".o").name

    monkeypatch.setattr(cross_check_aarch64, "compile_unit", compile_unit)
    sources = ("cpp/ops/joined.cc", "cpp/isa/select.cc", "cpp/isa/neon.cc", "cpp/bindings/core.cc")
    units = [cross_check_aarch64.Unit(source, ()) for source in sources]
    toolchain = cross_check_aarch64.Toolchain()
    objects = cross_check_aarch64.compile_units(units, tmp_path, toolchain)
    assert [path.stem for path in objects] == ["joined", "select", "neon", "core"]

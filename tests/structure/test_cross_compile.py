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

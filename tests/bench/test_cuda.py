"""What runs where a GPU is at hand, on the host device: the table of rooflines, and the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import cuda_roofline
from tests.cuda.host_library import build_driver, compiler
from tools.build_cuda_images import find_nvrtc
from tools.cuda_driver import FORMATS, TALL_FORMATS


@pytest.mark.skipif(compiler() is None, reason="the host device needs g++")
def test_every_kernel_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_roofline.main(["--library", str(build_driver()), "--small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "no limits were measured" in lines[0]
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    names = [row[0] for row in rows]
    expected = {f"multiply_{name}" for name in FORMATS}
    expected |= {f"gemm_{name}" for name in FORMATS if name.startswith("q")}
    expected |= {"column_sums", "mean_rows", "norm_rows", "add_rows", "gate_rows", "rope_rows"}
    expected |= {"convolve_rows", "delta_rule", "ssd", "latent_rows"}
    assert expected < set(names)
    expected |= {f"gemm_tall_{name}" for name in TALL_FORMATS}
    # Attention of a token and of rows, of both kinds; tiles are named with their rows.
    assert len(names) == len(set(names)) == len(expected) + 6
    assert sum(name.startswith(("attend_tiles", "column_tiles")) for name in names) == 2
    # 8 bits and a scale of 16 bits for 32 of 64 x 128 weights, a factor for 64 rows, the vector.
    n_bytes = 64 * 128 + 64 * 128 // 32 * 2 + 64 * 4 + 128 + 128 // 32 * 4 + 64 * 4
    assert rows[names.index("multiply_q8")][2] == f"{n_bytes / 1e6:,.2f} M"
    assert rows[names.index("gemm_q8")][1:3] == ["s8", f"{2 * 64 * 128 * 128 / 1e6:,.2f} M"]


def test_the_kernels_of_limits_compile(tmp_path: Path) -> None:
    if not find_nvrtc():
        pytest.skip("no NVRTC: python -m tools.build_cuda_images --fetch gets it")
    path = tmp_path / "peaks.ptx"
    assert cuda_roofline.main(["--write-peaks", str(path)]) == 0
    code = path.read_text(encoding="ascii", errors="replace")
    for kernel, instruction in (
        ("peak_copy", "ld.global"),
        ("peak_mma_s8", "mma.sync.aligned.m16n8k32"),
        ("peak_fma_f32", "fma.rn.f32"),
    ):
        assert instruction in code.split(f".entry {kernel}(")[1].split(".entry")[0]
    assert cuda_roofline.peaks_ptx(path) == path.read_bytes()


@pytest.mark.skipif(compiler() is None, reason="the host device needs g++")
def test_the_script_runs_every_step(tmp_path: Path) -> None:
    """A dry run with some of the tests: all of them are run anyway."""
    environment = os.environ | {
        "PYTHON": sys.executable,
        "KIT": str(tmp_path / "none"),
        "EDGEH2O_TEST_STEP": "97",
    }
    root = Path(cuda_roofline.__file__).parents[1]
    result = subprocess.run(
        ["bash", str(root / "bench/cuda.sh"), "--dry-run", str(tmp_path / "out")],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "all passed"
    steps = {path.stem for path in (tmp_path / "out").glob("*.txt")}
    assert steps == {"doctor", "kernels", "models", "roofline", "bench_tiny"}
    for step in ("kernels", "models"):
        assert "[100%]" in (tmp_path / "out" / f"{step}.txt").read_text()

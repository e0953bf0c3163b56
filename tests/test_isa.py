"""Which instruction set runs, and how it is chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from edgeh2o import UsageError, _core, isa


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_strongest_is_the_default_unless_one_is_forced() -> None:
    forced = os.environ.get("EDGEH2O_ISA")
    assert isa.active() == (forced or isa.available()[-1])
    assert isa.available()[0] == "scalar"


@pytest.mark.parametrize("name", _core.available_isas())
def test_the_environment_forces_one(name: str) -> None:
    code = "from edgeh2o import isa; print(isa.active())"
    assert run_python(code, EDGEH2O_ISA=name).stdout.strip() == name


def test_an_unknown_name_in_the_environment_lists_what_exists() -> None:
    result = run_python("from edgeh2o import isa; isa.active()", EDGEH2O_ISA="sse9")
    assert result.returncode != 0
    assert "ISA 'sse9' is not available on this processor; available: scalar" in result.stderr


def test_an_unknown_name_is_refused_and_changes_nothing() -> None:
    before = isa.active()
    with pytest.raises(UsageError, match="available: scalar"):
        isa.use("sse9")
    assert isa.active() == before


@pytest.mark.parametrize("name", _core.available_isas())
def test_attention_precisions(name: str) -> None:
    before = isa.active()
    isa.use(name)
    try:
        assert isa.attention_precision("f32") == "f32"
        in_shorts = ("avx2", "avxvnni", "avx512vnni", "avx512bf16")
        has_shorts = name in in_shorts and name != "avx512bf16"
        best = "bf16" if name == "avx512bf16" else "int16" if has_shorts else "f32"
        assert isa.attention_precision("auto") == best
        biased = isa.attention_precision("auto", has_key_bias=True)
        assert biased == ("int16" if has_shorts else "f32")
        assert isa.attention_precision("auto", has_key_bias=True, has_even_keys=False) == "f32"
        having = {
            "bf16": ("scalar", "avx512bf16", "neon_i8mm"),
            "f16": ("scalar", "neon_dotprod", "neon_i8mm"),
            "int8": ("scalar", "avxvnni", "avx512vnni", "avx512bf16", "neon_dotprod", "neon_i8mm"),
            "int16": in_shorts,
        }
        for narrow, names in having.items():
            if name in names:
                assert isa.attention_precision(narrow) == narrow
            else:
                with pytest.raises(UsageError, match=f"{narrow}: the instruction set {name} has"):
                    isa.attention_precision(narrow)
    finally:
        isa.use(before)


@pytest.mark.parametrize("n_threads", [0, -1, 257])
def test_thread_counts_out_of_range_are_refused(n_threads: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 256"):
        _core.set_num_threads(n_threads)

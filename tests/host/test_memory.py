"""Memory figures: limits that apply, peaks that hold, numbers that read well."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from edgeh2o.host import cgroup, memory


def test_available_is_bounded_by_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory_left_bytes", lambda: 12345)
    assert memory.available_bytes() == 12345
    assert memory.binding_limit() == "of this control group or container"
    monkeypatch.setattr(cgroup, "memory_left_bytes", lambda: None)
    assert 0 < memory.available_bytes() <= psutil.virtual_memory().total
    assert memory.binding_limit() == ""


def test_available_is_bounded_by_the_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 50_000_000, -1))
    assert 0 < memory.available_bytes() <= 60_000_000
    assert memory.binding_limit() == "of addresses (ulimit -v)"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used // 2, -1))
    assert memory.available_bytes() == 0


def test_available_as_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory_left_bytes", lambda: None)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  2000 kB\n")
    assert memory.available_bytes(meminfo) == 2000 * 1024
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\n")  # Linux before 3.14
    assert memory.available_bytes(meminfo) > 2000 * 1024


def test_available_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", fail)
    assert memory.available_bytes(tmp_path / "missing") > 0


def test_peak_covers_what_was_touched_and_freed() -> None:
    before = psutil.Process().memory_info().rss
    block = np.ones(40_000_000, dtype=np.uint8)
    del block
    assert memory.peak_rss_bytes() >= before + 30_000_000


def test_peak_reads_the_status_file_or_falls_back(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    1234 kB\nVmRSS:\t 1000 kB\n", encoding="ascii")
    assert memory.peak_rss_bytes(status) == 1234 * 1024
    assert memory.peak_rss_bytes(tmp_path / "missing") > 1_000_000


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 KiB"),
        (12 * 1024, "12 KiB"),
        (3 * 2**20 // 2, "1.5 MiB"),
        (410 * 2**20, "410 MiB"),
        (2**30, "1.0 GiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert memory.format_bytes(count) == text


@pytest.mark.parametrize(("system", "unit"), [("darwin", 1), ("linux", 1024)])
def test_the_peak_of_getrusage_is_in_the_unit_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, unit: int
) -> None:
    usage = SimpleNamespace(ru_maxrss=5_000_000)
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    monkeypatch.setattr(sys, "platform", system)
    assert memory.peak_rss_bytes(tmp_path / "missing") == 5_000_000 * unit

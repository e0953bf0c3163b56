"""The default number of threads on made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeh2o.host import sysctl, threads
from tests.host.system_files import write_tree


def _write_frequencies(root: Path, frequencies: list[int]) -> Path:
    return write_tree(
        root,
        {
            f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq": f"{khz}\n"
            for cpu, khz in enumerate(frequencies)
        },
    )


@pytest.mark.parametrize(
    ("frequencies", "expected"),
    [
        ([1800000] * 4 + [2400000] * 4, 4),
        ([5000000, 5100000, 5000000, 5000000], 4),
        ([1500000] * 4, 4),
        ([], 8),
        ([2400000] * 3, 8),
    ],
)
def test_threads_are_the_cores_of_the_fastest_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frequencies: list[int], expected: int
) -> None:
    n_cpus = len(frequencies) if len(frequencies) > 3 else 8
    monkeypatch.setattr(threads, "_usable_cpus", lambda: list(range(n_cpus)))
    assert threads.default_thread_count(_write_frequencies(tmp_path, frequencies)) == expected


@pytest.mark.parametrize(("quota", "expected"), [("250000", 2), ("50000", 1), ("max", 8)])
def test_threads_stay_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(threads, "_usable_cpus", lambda: list(range(8)))
    write_tree(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"},
    )
    assert threads.default_thread_count(tmp_path) == expected


@pytest.mark.parametrize(
    ("told", "expected", "reason"),
    [
        ({"hw.perflevel0.logicalcpu": 6}, 6, "slower cores would hold the others up"),
        ({"hw.perflevel0.logicalcpu": 10}, 10, "every usable core"),  # none for efficiency
        ({}, 10, "every usable core"),  # an Intel Mac
    ],
)
def test_threads_are_the_performance_cores_of_apple_silicon(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: dict[str, int],
    expected: int,
    reason: str,
) -> None:
    monkeypatch.setattr(threads, "_usable_cpus", lambda: list(range(10)))
    monkeypatch.setattr(sysctl, "read_int", told.get)
    chosen = threads.choose_threads(tmp_path)
    assert (chosen.count, chosen.reason) == (expected, reason)


def test_a_system_without_affinity_has_all_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert threads._usable_cpus() == list(range(12))

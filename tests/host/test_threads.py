"""The default number of threads on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeh2o.host import threads
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

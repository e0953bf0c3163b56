"""How many threads suit this machine when the user names no number."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import MAX_THREADS
from . import cgroup

# Clusters of one chip differ by a quarter or more; favoured cores of one cluster by a few percent.
_SAME_CLUSTER_SHARE = 0.8


def default_thread_count(root: Path = Path("/")) -> int:
    """Usable cores of the fastest cluster, within the affinity mask and the CPU quota.

    Slow cores of a big.LITTLE chip are left out: a static split of the work would wait for them.
    """
    cpus = _usable_cpus()
    frequencies = [_max_frequency(root, cpu) for cpu in cpus]
    count = len(cpus)
    if all(frequencies):
        count = sum(f >= _SAME_CLUSTER_SHARE * max(frequencies) for f in frequencies)
    quota = cgroup.cpu_quota(root)
    if quota is not None:
        count = min(count, int(quota))
    return min(max(1, count), MAX_THREADS)


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _max_frequency(root: Path, cpu: int) -> int:
    """The core's highest clock in kHz, 0 where the system does not tell."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq"
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0

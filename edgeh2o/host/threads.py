"""How many threads suit this machine when the user names no number."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..config import MAX_THREADS
from . import cgroup, sysctl

# Clusters of one chip differ by a quarter or more; favoured cores of one cluster by a few percent.
_SAME_CLUSTER_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads and what it was made of.

    ``n_fastest`` is None where the system does not tell cores apart; ``quota`` is in CPUs' worth of
    time, None without a limit.
    """

    count: int
    n_usable: int
    n_fastest: int | None
    quota: float | None

    @property
    def reason(self) -> str:
        """What set the number, in words."""
        if self.quota is not None and self.quota < (self.n_fastest or self.n_usable):
            return f"the control group allows {self.quota:g} CPUs of time"
        if self.n_fastest is not None and self.n_fastest < self.n_usable:
            return "slower cores would hold the others up"
        return "every usable core"


def default_thread_count(root: Path = Path("/")) -> int:
    """Usable cores of the fastest cluster, within the affinity mask and the CPU quota."""
    return choose_threads(root).count


def choose_threads(root: Path = Path("/")) -> ThreadChoice:
    """As ``default_thread_count``, with the reasons.

    Slow cores of a big.LITTLE chip are left out: a static split of the work would wait for them.
    """
    cpus = _usable_cpus()
    frequencies = [_max_frequency(root, cpu) for cpu in cpus]
    n_fastest = _performance_cores(len(cpus))
    if all(frequencies):
        n_fastest = sum(f >= _SAME_CLUSTER_SHARE * max(frequencies) for f in frequencies)
    count = len(cpus) if n_fastest is None else n_fastest
    quota = cgroup.cpu_quota(root)
    if quota is not None:
        count = min(count, int(quota))
    return ThreadChoice(min(max(1, count), MAX_THREADS), len(cpus), n_fastest, quota)


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _performance_cores(n_usable: int) -> int | None:
    """Those of Apple silicon, whose others are efficiency cores; None on other machines."""
    count = sysctl.read_int("hw.perflevel0.logicalcpu")
    return min(count, n_usable) if count else None


def _max_frequency(root: Path, cpu: int) -> int:
    """The core's highest clock in kHz, 0 where the system does not tell."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq"
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0

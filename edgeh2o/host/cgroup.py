"""Limits that a Linux control group puts on this process, version 1 and 2.

The tightest group on the way from the process's own group up to the root counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Version 1 reports "no limit" as the largest multiple of the page size below 2**63.
_NO_LIMIT_BYTES = 2**62


def memory_left_bytes(root: Path = Path("/")) -> int | None:
    """Bytes this process may still take before its group is full, None without a limit.

    File pages that the kernel can drop do not count as used, as in ``MemAvailable``.
    """
    lefts = []
    for folder in _group_folders(root, "memory"):
        version_2 = (folder / "memory.max").exists()
        limit = _read_int(folder / ("memory.max" if version_2 else "memory.limit_in_bytes"))
        used = _read_int(folder / ("memory.current" if version_2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= _NO_LIMIT_BYTES:
            continue
        prefix = "" if version_2 else "total_"
        droppable = sum(
            _read_stat(folder / "memory.stat", f"{prefix}{state}_file")
            for state in ("inactive", "active")
        )
        lefts.append(max(0, limit - max(0, used - droppable)))
    return min(lefts, default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the group may use, None without a limit."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        pair = _read_words(folder / "cpu.max")
        if len(pair) != 2:
            pair = _read_words(folder / "cpu.cfs_quota_us")
            pair += _read_words(folder / "cpu.cfs_period_us")
        if len(pair) == 2 and all(word.isdecimal() for word in pair) and int(pair[1]) > 0:
            quotas.append(int(pair[0]) / int(pair[1]))
    return min(quotas, default=None)


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Every folder that limits ``controller``, from the process's own group to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controllers if controllers else mount
        if controllers and not base.is_dir():
            base = mount / controller
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):
            yield base / part


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _read_int(path: Path) -> int | None:
    words = _read_words(path)
    return int(words[0]) if words and words[0].isdecimal() else None


def _read_stat(path: Path, key: str) -> int:
    words = _read_words(path)
    for name, value in zip(words[::2], words[1::2], strict=False):
        if name == key and value.isdecimal():
            return int(value)
    return 0

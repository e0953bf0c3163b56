"""Limits of control groups, read from made-up trees of both versions."""

from __future__ import annotations

from pathlib import Path

from edgeh2o.host import cgroup
from tests.host.system_files import write_tree

NO_LIMIT_V1 = "9223372036854771712"


def test_version_2_takes_the_tightest_group_and_adds_droppable_pages(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "500\n",
            "sys/fs/cgroup/outer/memory.max": "1000\n",
            "sys/fs/cgroup/outer/memory.current": "700\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 400\ninactive_file 250\nactive_file 50\n",
            "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
        },
    )
    assert cgroup.memory_left_bytes(root) == 1000 - (700 - 250 - 50)
    assert cgroup.cpu_quota(root) == 1.5


def test_version_1(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1096\n",
            "sys/fs/cgroup/memory/box/memory.stat": "cache 10\ntotal_inactive_file 96\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "99999\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup.memory_left_bytes(root) == 3096
    assert cgroup.cpu_quota(root) == 3.0


def test_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "160\n",
        },
    )
    assert cgroup.memory_left_bytes(root) == 0


def test_without_limits_or_without_proc(tmp_path: Path) -> None:
    assert cgroup.memory_left_bytes(tmp_path) is None
    assert cgroup.cpu_quota(tmp_path) is None
    write_tree(tmp_path, {"proc/self/cgroup": "0::/\n"})
    assert cgroup.memory_left_bytes(tmp_path) is None
    assert cgroup.cpu_quota(tmp_path) is None

"""What a machine offers, as far as it tells: CPU, threads, memory, heat, versions."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import isa
from .._version import __version__
from ..cuda.devices import examine_devices
from ..errors import UsageError
from . import cgroup, memory, sysctl
from .threads import choose_threads

# Those that the kernels use, as Linux spells them on x86-64 and on aarch64.
_FEATURES = (
    "avx avx2 fma f16c avx_vnni avx512f avx512bw avx512dq avx512vl avx512_vnni "
    "asimd asimddp asimdhp i8mm"
)
# macOS's names for those that it tells one by one.
_MACOS_FEATURES = {
    "avx": "hw.optional.avx1_0",
    "avx2": "hw.optional.avx2_0",
    "fma": "hw.optional.fma",
    "f16c": "hw.optional.f16c",
    "avx512f": "hw.optional.avx512f",
    "avx512bw": "hw.optional.avx512bw",
    "avx512dq": "hw.optional.avx512dq",
    "avx512vl": "hw.optional.avx512vl",
    "asimd": "hw.optional.AdvSIMD",
    "asimddp": "hw.optional.arm.FEAT_DotProd",
    "asimdhp": "hw.optional.arm.FEAT_FP16",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
}
_PACKAGES = ("numpy", "tokenizers", "jinja2", "psutil", "rich", "onnxruntime")


def examine_machine(root: Path = Path("/")) -> dict[str, Any]:
    """A report of plain values; what the system does not tell is None or left out."""
    threads = choose_threads(root)
    return {
        "cpu": {
            "model": cpu_model(root),
            "architecture": platform.machine(),
            "features": _cpu_features(root),
        },
        "kernels": _examine_kernels(),
        "threads": {
            "chosen": threads.count,
            "why": threads.reason,
            "usable_by_affinity": threads.n_usable,
            "in_fastest_cluster": threads.n_fastest,
            "quota_of_control_group": threads.quota,
        },
        "gpu": examine_devices(),
        "memory_bytes": _examine_memory(root),
        "heat": {
            "degrees_celsius": _temperatures(root),
            "throttled_times": _throttle_count(root),
            "power_mode": _read(root / "var/lib/nvpmodel/status"),  # of a Jetson
            "governor": _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        },
        "versions": {
            "edgeh2o": __version__,
            "python": sys.version.split()[0],
            "system": platform.platform(),
            **{name: _package_version(name) for name in _PACKAGES},
        },
    }


def _examine_kernels() -> dict[str, Any]:
    try:
        return {"available": isa.available(), "chosen": isa.active()}
    except UsageError as error:  # of EDGEH2O_ISA
        return {"available": isa.available(), "chosen": None, "error": str(error)}


def _examine_memory(root: Path) -> dict[str, Any]:
    import psutil

    return {
        "total": int(psutil.virtual_memory().total),
        "available": memory.available_bytes(),
        "left_in_control_group": cgroup.memory_left_bytes(root),
    }


def cpu_model(root: Path = Path("/")) -> str | None:
    """Name of the processor and the board, None where the system does not tell."""
    board = _read(root / "sys/firmware/devicetree/base/model")
    for name in ("model name", "Model", "Hardware"):
        for value in _cpuinfo(root, name):
            return value if board is None else f"{value} ({board})"
    return board or sysctl.read_text("machdep.cpu.brand_string") or platform.processor() or None


def _cpu_features(root: Path) -> list[str]:
    for name in ("flags", "Features"):
        for value in _cpuinfo(root, name):
            flags = set(value.split())
            return [feature for feature in _FEATURES.split() if feature in flags]
    return [feature for feature, name in _MACOS_FEATURES.items() if sysctl.read_int(name)]


def _cpuinfo(root: Path, key: str) -> Iterable[str]:
    text = _read(root / "proc/cpuinfo") or ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            yield value.strip()


def _temperatures(root: Path) -> dict[str, float]:
    """Degrees by the name of the sensor."""
    degrees = {}
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        reading = _read(zone / "temp")
        if reading is not None and reading.lstrip("-").isdecimal():
            degrees[_read(zone / "type") or zone.name] = int(reading) / 1000
    return degrees


def _throttle_count(root: Path) -> int | None:
    """How often cores were slowed down for heat since the start, None if unknown."""
    pattern = "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count"
    counts = [_read(path) for path in root.glob(pattern)]
    known = [int(count) for count in counts if count is not None and count.isdecimal()]
    return sum(known) if known else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0 \n")
    except OSError:
        return None


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

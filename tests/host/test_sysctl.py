"""What macOS tells by name, by a made-up C library; a system without such names tells nothing."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeh2o.host import machine, sysctl

M2 = {
    "machdep.cpu.brand_string": b"Apple M2\0",
    "hw.perflevel0.logicalcpu": (4).to_bytes(4, sys.byteorder),
    "hw.memsize": (24 * 2**30).to_bytes(8, sys.byteorder),
    "hw.optional.AdvSIMD": (1).to_bytes(4, sys.byteorder),
    "hw.optional.arm.FEAT_DotProd": (1).to_bytes(4, sys.byteorder),
    "hw.optional.arm.FEAT_I8MM": (0).to_bytes(4, sys.byteorder),
    "hw.clockrate": b"",
}


class Library:
    """A C library whose sysctlbyname answers from a table, as sysctl(3) says."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self._values = values

    def sysctlbyname(self, key: bytes, value: Any, size: Any, new: None, new_size: Any) -> int:
        assert (new, new_size.value) == (None, 0)
        told = self._values.get(key.decode("ascii"))
        if told is None:
            return -1  # ENOENT
        n_bytes = size._obj
        if value is not None:
            assert n_bytes.value >= len(told)
            ctypes.memmove(value, told, len(told))
        n_bytes.value = len(told)
        return 0


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library(M2))


def test_values_are_read_by_name(mac: None) -> None:
    assert sysctl.read_text("machdep.cpu.brand_string") == "Apple M2"
    assert sysctl.read_int("hw.perflevel0.logicalcpu") == 4
    assert sysctl.read_int("hw.memsize") == 24 * 2**30
    assert sysctl.read_int("hw.no_such_name") is None
    assert sysctl.read_text("hw.no_such_name") is None
    assert sysctl.read_int("hw.clockrate") is None
    assert sysctl.read_int("machdep.cpu.brand_string") is None


def test_another_system_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library(M2))
    assert sysctl.read_int("hw.memsize") is None


def test_the_report_of_a_mac(mac: None, tmp_path: Path) -> None:
    assert machine.cpu_model(tmp_path) == "Apple M2"
    assert machine._cpu_features(tmp_path) == ["asimd", "asimddp"]

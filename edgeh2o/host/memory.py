"""What this process uses and may still use of the machine's memory, in bytes."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from ..errors import ResourceError
from . import cgroup

# Of addresses that NumPy with its BLAS and the tokenizers take at least.
LIBRARY_ADDRESS_BYTES = 128 * 2**20

_M_ARENA_MAX = -8  # of malloc.h
_DEFAULT_STACK_BYTES = 8 * 2**20


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The least of: free and droppable memory, what the control group and RLIMIT_AS leave."""
    return _least_left(meminfo)[0]


def binding_limit(meminfo: Path = Path("/proc/meminfo")) -> str:
    """What leaves less than the machine has: "of ..." a limit; empty if none does."""
    return _least_left(meminfo)[1]


def _least_left(meminfo: Path) -> tuple[int, str]:
    limits = [(_droppable_bytes(meminfo), "")]
    group_left = cgroup.memory_left_bytes()
    if group_left is not None:
        limits.append((group_left, "of this control group or container"))
    addresses_left = address_space_left_bytes()
    if addresses_left is not None:
        limits.append((addresses_left, "of addresses (ulimit -v)"))
    return min(limits)


def address_space_left_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """What RLIMIT_AS (``ulimit -v``) leaves to be mapped; None without such a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - (_read_field(status, b"VmSize:") or 0))


def counts_when_allocated(overcommit: Path = Path("/proc/sys/vm/overcommit_memory")) -> bool:
    """Whether memory is counted when it is allocated, and not when it is written to.

    So it is under RLIMIT_AS, and where the system promises no more than it has.
    """
    with suppress(OSError):
        if overcommit.read_bytes().strip() == b"2":
            return True
    return address_space_left_bytes() is not None


def does_not_hold(addresses: int, what: str) -> ResourceError:
    """The error of something for which so many bytes of addresses that are left are too few."""
    return ResourceError(
        f"the address space that is left, {format_bytes(addresses)}, does not hold {what}; raise "
        "its limit (ulimit -v)"
    )


def require_library_addresses() -> None:
    """Raises ResourceError where RLIMIT_AS leaves too little for the libraries, unless they are in.

    OpenBLAS would end the process.
    """
    left = address_space_left_bytes()
    if left is not None and left < LIBRARY_ADDRESS_BYTES and "numpy" not in sys.modules:
        raise does_not_hold(left, "the libraries")


def keep_one_arena() -> None:
    """Lets glibc serve every thread from one heap: each of more reserves 64 MiB of addresses."""
    import ctypes

    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Gives memory that was freed back to the system, also what lies between other blocks (glibc).

    After many large blocks that lived for a moment: what stays lies between their places.
    """
    import ctypes

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def thread_stack_bytes() -> int:
    """Addresses that the stack of a thread takes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _DEFAULT_STACK_BYTES if limit == resource.RLIM_INFINITY else limit


def _droppable_bytes(meminfo: Path) -> int:
    """Free memory and what the kernel can drop. Importing psutil would take 9 ms on Linux."""
    if (droppable := _read_field(meminfo, b"MemAvailable:")) is not None:
        return droppable
    import psutil

    try:
        return int(psutil.virtual_memory().available)
    except (OSError, psutil.Error):  # /proc is missing or closed to us
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most resident memory this process had since it started.

    ``ru_maxrss`` serves only where /proc is missing: Linux carries it over from the parent.
    """
    if (peak := _read_field(status, b"VmHWM:")) is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _read_field(path: Path, field: bytes) -> int | None:
    """Bytes of a line "field: n kB" of a file in /proc, if it can be read and has it."""
    try:
        with path.open("rb") as lines:
            for line in lines:
                if line.startswith(field):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def format_bytes(count: float) -> str:
    """``count`` with a unit: 3.2 GiB, 410 MiB, 12 KiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            digits = 1 if count < 100 * scale else 0
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count / 1024:.0f} KiB"

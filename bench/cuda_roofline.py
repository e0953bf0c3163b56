"""What fraction of the roofline each kernel for GPUs reaches, as a Markdown table.

    python -m bench.cuda_roofline [--library libcuda.so.1] [--small] [--peaks FILE.ptx]
    python -m bench.cuda_roofline --write-peaks FILE.ptx

Bytes and operations are counted from the sizes: every operand is read once and every result written
once. The limits are measured on the device: a copy, loops of products on tensor cores (IMMA, HMMA)
and one of fused multiply-adds (bench/cuda_peaks.cu, compiled by an NVRTC that is found, or PTX that
--write-peaks made elsewhere). On the host device (--small) no time means anything; it shows that
the script runs.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import c_uint32, c_uint64, c_void_p
from pathlib import Path

from tools.build_cuda_images import CompileError, find_nvrtc
from tools.cuda_driver import Device

from .cuda_cases import ALL_CASES, LARGE, SMALL, Sizes

SOURCE = Path(__file__).with_name("cuda_peaks.cu")
# Of a measurement: launches are repeated until they take as long.
LEAST_SECONDS = 0.05
LEAST_ROUNDS = 3


class CopyArguments(ctypes.Structure):
    _fields_ = (("to", c_void_p), ("source", c_void_p), ("n", c_uint64))


class LoopArguments(ctypes.Structure):
    _fields_ = (("out", c_void_p), ("n", c_uint32))


def seconds_of(device: Device, launch: Callable[[], None]) -> float:
    """Of one launch, behind one that is not counted."""
    launch()
    device.wait()
    n = LEAST_ROUNDS
    while True:
        started = time.perf_counter()
        for _ in range(n):
            launch()
        device.wait()
        elapsed = time.perf_counter() - started
        if elapsed >= LEAST_SECONDS or device.is_emulated:
            return elapsed / n
        n *= 4


def peaks_ptx(given: Path | None) -> bytes | None:
    """The kernels of bench/cuda_peaks.cu, None where nothing can compile them."""
    if given is not None:
        return given.read_bytes()
    for library in find_nvrtc().values():
        try:
            return library.compile("compute_80", SOURCE).code
        except CompileError as error:
            print(f"the kernels of peaks do not compile: {error}", file=sys.stderr)
    return None


def measure_peaks(device: Device, sizes: Sizes, ptx: bytes | None) -> dict[str, float]:
    """Bytes and operations a second; only what the device has kernels of."""
    if ptx is None or device.is_emulated:
        return {}
    kernels = device.load(ptx)
    n_processors = device.attribute(16)
    to, source = (device.empty(sizes.copy_bytes) for _ in range(2))
    out = device.empty(4096)
    copied = CopyArguments(to=to, source=source, n=sizes.copy_bytes // 16)
    looped = LoopArguments(out=out, n=sizes.loop)
    n_blocks, threads = 8 * n_processors, 256

    def rate(kernel: str, arguments: ctypes.Structure, amount: float) -> float:
        def launch() -> None:
            device.launch_of(kernels, kernel, arguments, (n_blocks,), threads)

        return amount / seconds_of(device, launch)

    n_warps = n_blocks * threads // 32
    peaks = {
        "bytes": rate("peak_copy", copied, 2 * sizes.copy_bytes),
        "s8": rate("peak_mma_s8", looped, n_warps * sizes.loop * 8 * 2 * 16 * 8 * 32),
        "f16": rate("peak_mma_f16", looped, n_warps * sizes.loop * 8 * 2 * 16 * 8 * 16),
        "f32": rate("peak_fma_f32", looped, n_blocks * threads * sizes.loop * 16 * 2),
    }
    for address in (to, source, out):
        device.free(address)
    return peaks


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--library", type=Path, default=Path("libcuda.so.1"))
    parser.add_argument(
        "--small", action="store_true", help="sizes that the host device is fit for"
    )
    parser.add_argument("--peaks", type=Path, metavar="FILE", help="PTX of bench/cuda_peaks.cu")
    parser.add_argument("--write-peaks", type=Path, metavar="FILE", help="compile that, no more")
    arguments = parser.parse_args(argv)
    ptx = peaks_ptx(arguments.peaks)
    if arguments.write_peaks:
        if ptx is None:
            print("no NVRTC was found; tools.build_cuda_images --fetch gets it", file=sys.stderr)
            return 1
        arguments.write_peaks.write_bytes(ptx)
        return 0
    device, sizes = Device(arguments.library), SMALL if arguments.small else LARGE
    peaks = measure_peaks(device, sizes, ptx)
    units = {"bytes": "GB/s", "s8": "Gop/s", "f16": "Gflop/s", "f32": "Gflop/s"}
    for limit, peak in peaks.items():
        print(f"limit of {limit}: {peak / 1e9:,.0f} {units[limit]}")
    if not peaks:
        print("no limits were measured: an emulated device, or nothing that compiles their kernels")
    print(
        "\n| kernel | bound by | amount | time | rate | of the limit |\n|---|---|---|---|---|---|"
    )
    for cases in ALL_CASES:
        for case in cases(device, sizes):
            seconds = seconds_of(device, case.launch)
            rate = case.amount / seconds
            cells = [
                case.name,
                case.limit,
                f"{case.amount / 1e6:,.2f} M",
                f"{seconds * 1e6:,.1f} us",
            ]
            cells.append(f"{rate / 1e9:,.1f} {units[case.limit]}")
            cells.append(f"{rate / peaks[case.limit]:.0%}" if case.limit in peaks else "")
            print("|", " | ".join(cells), "|", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

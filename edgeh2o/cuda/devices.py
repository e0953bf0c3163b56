"""The device that a model runs on: the CPU, or a GPU with the kernels for it.

The driver is opened when a GPU is asked for, and never for the CPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..config import DEVICE_NAME
from ..errors import ResourceError, UsageError
from .images import Image, find_images

if TYPE_CHECKING:
    from .. import _core

VARIABLE = "EDGEH2O_DEVICE"
# What the kernels need: products of 8-bit matrices and asynchronous copies.
LEAST_CAPABILITY = (8, 0)
# Multiply-adds with quantised weights of prompts per clock of a processor: 1B shape on an H100.
PRODUCTS_PER_CLOCK = 300
# Left to whatever else the GPU does.
RESERVE_BYTES = 64 * 2**20


def choose_device(name: str) -> int | None:
    """The number of the GPU that ``name`` of ``RuntimeConfig`` means, None for the CPU.

    "auto" is what EDGEH2O_DEVICE says, else the CPU: no GPU has been proven faster yet. Raises
    UsageError for a variable that names no device.
    """
    if name == "auto":
        name = os.environ.get(VARIABLE) or "cpu"
        if not DEVICE_NAME.fullmatch(name):
            raise UsageError(f"{VARIABLE} must be auto, cpu, cuda or cuda:N, got {name!r:.80}")
    return int(name.partition(":")[2] or 0) if name.startswith("cuda") else None


def open_device(ordinal: int) -> _core.Device:
    """A GPU with its kernels loaded.

    Raises ResourceError, with the reason, where there is no driver, no such device, no kernels for
    it in this package.
    """
    from .. import _core

    device = _core.Device(ordinal)
    device.load_image(choose_image(device.properties()["compute_capability"]).read())
    return device


def choose_image(capability: tuple[int, int]) -> Image:
    """The code for a compute capability. Raises ResourceError if there is none."""
    major, minor = capability
    if capability < LEAST_CAPABILITY:
        raise ResourceError(
            f"the GPU has compute capability {major}.{minor} and the kernels need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later; use --device cpu"
        )
    images = {image.target: image for image in find_images()}
    for target in (f"sm_{major}{minor}", "compute_80"):
        if target in images:
            return images[target]
    raise ResourceError(
        "this package was built without code for "
        + (f"a GPU of compute capability {major}.{minor}" if images else "GPUs")
        + ": NVRTC was not found; build it again where it is (docs/devices.md), or use --device cpu"
    )


def describe_device(ordinal: int, properties: dict[str, Any]) -> str:
    """A device in a line: "cuda:0 (Orin, compute capability 8.7)"."""
    major, minor = properties["compute_capability"]
    return f"cuda:{ordinal} ({properties['name']}, compute capability {major}.{minor})"


def product_rate(properties: dict[str, Any]) -> float:
    """Multiply-adds per second with quantised weights in prompts, as counted from the device."""
    return PRODUCTS_PER_CLOCK * float(properties["clock_hz"]) * int(properties["n_processors"])


def memory_left(device: _core.Device) -> int | None:
    """Bytes of a GPU's own memory that models may take; None where it shares that of the CPU."""
    properties = device.properties()
    if properties["is_integrated"]:
        return None
    return max(0, int(properties["free_bytes"]) - RESERVE_BYTES)


def require_memory(device: _core.Device, n_bytes: int, what: str) -> None:
    """Raises ResourceError with the numbers if a GPU with memory of its own has not that much left.

    One that shares the memory of the CPU is covered by the checks of that.
    """
    free = memory_left(device)
    if free is not None and n_bytes > free:
        raise ResourceError(
            f"{what} of {n_bytes / 2**20:,.0f} MiB does not fit in the {free / 2**20:,.0f} MiB "
            "that the GPU has left; use a smaller context (-c) or model, or --device cpu"
        )


def examine_devices() -> dict[str, Any]:
    """For ``doctor``: the images in this package, the driver, the GPUs, or why there are none."""
    from .. import _core

    report: dict[str, Any] = {
        "images": [f"{image.target} ({image.made_by})" for image in find_images()] or None,
        "chosen_by_auto": "cpu: no GPU has been proven faster",
    }
    if not report["images"]:
        report["images_missing"] = "built without NVRTC; --device cuda is refused"
    try:
        n_devices = _core.device_count()
        report["devices"] = {f"cuda:{ordinal}": _examine(ordinal) for ordinal in range(n_devices)}
    except ResourceError as error:
        report["devices"] = None
        report["why_none"] = str(error)
    return report


def _examine(ordinal: int) -> dict[str, Any]:
    from .. import _core

    properties: dict[str, Any] = dict(_core.Device(ordinal).properties())
    version = properties["driver_version"]
    properties["driver_version"] = f"CUDA {version // 1000}.{version % 1000 // 10}"
    properties["compute_capability"] = "{}.{}".format(*properties["compute_capability"])
    try:
        difference = open_device(ordinal).self_test()
        properties["usable"] = not difference
        properties["self_test"] = difference or "passed"
    except ResourceError as error:
        properties["usable"] = False
        properties["why_not"] = str(error)
    return properties

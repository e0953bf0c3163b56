"""The driver API and the structures of cpp/cuda/kernels/arguments.h, for tests and measurements."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeh2o.cuda.devices import choose_image

FORMATS = ["f32", "f16", "bf16", "q4", "q4_min", "q4_small", "q4_small_min"]
FORMATS += ["q8", "q8_min", "q8_small"]
# Those whose matrix products have a kernel for 128 rows.
TALL_FORMATS = ["q4", "q4_min", "q8", "q8_min"]
TILE_DIMS = (64, 128, 256)  # of attention


class Structure(ctypes.Structure):
    """One that is made of keyword arguments; what is left out is 0."""


def _structure(name: str, **fields: Any) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": list(fields.items())})


_P, _U, _F = c_void_p, c_uint32, c_float
Matrix = _structure(
    "Matrix", values=_P, scales=_P, row_factors=_P, n_out=_U, depth=_U, n_tiles=_U, format=_U
)
Quantised = _structure("Quantised", q=_P, d=_P, padded=_U)
Cache = _structure("Cache", k=_P, v=_P, max_context=_U, k_type=_U, v_type=_U)
Heads = _structure("Heads", n_heads=_U, n_kv_heads=_U, key_dim=_U, value_dim=_U, value_stride=_U)
Further = _structure("Further", w=Matrix, bias=_P, out=_P, first_panel=_U)
Multiply = _structure(
    "Multiply", w=Matrix, x=_P, xq=Quantised, bias=_P, out=_P, x_stride=_U, out_stride=_U,
    accumulates=_U, n_rows=_U, heads=_P, x_step=_U, out_step=_U, further=Further * 2, n_further=_U,
)  # fmt: skip
Norm = _structure(
    "Norm", x=_P, weight=_P, out=_P, xq=Quantised, dim=_U, n_groups=_U, x_stride=_U,
    out_stride=_U, eps=_F, indices=_P, weight_stride=_U, group_stride=_U,
)  # fmt: skip
Mix = _structure("Mix", x=_P, entries=_P, weights=_P, out=_P, dim=_U, n_used=_U)
Add = _structure("Add", x=_P, y=_P, weight=_P, dim=_U, eps=_F, scale=_F)
Gate = _structure("Gate", gate=_P, up=_P, out=_P, xq=Quantised, dim=_U, gate_stride=_U, kind=_U)
Embed = _structure(
    "Embed", parts=_P, tokens=_P, out=_P, part_rows=_U, first=_U, n_columns=_U, scale=_F
)
Rope = _structure(
    "Rope", qkv=_P, cos=_P, sin=_P, cache=Cache, heads=Heads, stride=_U, n_pairs=_U, first=_U,
    norms_values=_U, q_norm=_P, k_norm=_P, q_factors=_P, eps=_F, start=_P,
)  # fmt: skip
Latent = _structure(
    "Latent", qkv=_P, heads=_P, cos=_P, sin=_P, norm=_P, cache=Cache, n_heads=_U, rank=_U,
    nope_dim=_U, rope_dim=_U, stride=_U, first=_U, eps=_F, start=_P,
)  # fmt: skip
KeyList = _structure("KeyList", positions=_P, counts=_P, stride=_U, lowest=_U, window=_U)
Attend = _structure(
    "Attend", qkv=_P, cache=Cache, heads=Heads, parts=_P, states=_P, biases=_P, keys=KeyList,
    stride=_U, first=_U, first_split=_U, n_splits=_U, block_heads=_U, scale=_F, soft_cap=_F,
    rows=_P, start=_P,
)  # fmt: skip
ListedRows = _structure("ListedRows", cache=Cache, keys=KeyList, biases=_P)
AttendTiles = _structure(
    "AttendTiles", qkv=_P, heads=Heads, lists=ListedRows * 3, out=_P, states=_P, sinks=_P,
    n_lists=_U, stride=_U, first=_U, n_rows=_U, out_stride=_U, part_floats=_U, is_joint=_U,
    scale=_F, soft_cap=_F,
)  # fmt: skip
Join = _structure(
    "Join", states=_P, out=_P, n_rows=_U, first_split=_U, n_joined=_U, n_splits=_U, sinks=_P,
    n_heads=_U,
)  # fmt: skip
Columns = _structure(
    "Columns", qkv=_P, cache=Cache, heads=Heads, states=_P, sums=_P, is_scored=_P,
    keys=KeyList, stride=_U, first=_U, n_rows=_U, sums_stride=_U, part_stride=_U, n_last=_U,
    weight=_U, squares=_U, scale=_F, soft_cap=_F,
)  # fmt: skip
Means = _structure(
    "Means", cache=Cache, heads=Heads, keys=KeyList, ranges=_P, counts=_P, k=_P, v=_P, n_rows=_U
)
Signs = _structure("Signs", q=_P, out=_P, n_heads=_U, dim=_U, stride=_U)
Convolve = _structure(
    "Convolve", x=_P, factor=_P, gate=_P, weights=_P, biases=_P, state=_P, out=_P, stride=_U,
    channels=_U, n_taps=_U, n_rows=_U,
)  # fmt: skip
DeltaGate = _structure("DeltaGate", gates=_P, a=_P, biases=_P, n_rows=_U, n_heads=_U)
Delta = _structure(
    "Delta", qkv=_P, gates=_P, state=_P, out=_P, stride=_U, n_rows=_U, n_key_heads=_U,
    n_value_heads=_U, head_dim=_U, are_grouped=_U,
)  # fmt: skip
Ssd = _structure(
    "Ssd", rows=_P, rates=_P, a=_P, biases=_P, skips=_P, state=_P, out=_P, stride=_U,
    rate_stride=_U, n_rows=_U, n_heads=_U, n_groups=_U, head_dim=_U, state_dim=_U,
)  # fmt: skip
# Shared memory of a block: ``MeanShared``, ``SsdShared`` and ``CombineShared``.
MEAN_SHARED_BYTES = (128 + 4 + 4 * 128) * 4
SSD_SHARED_BYTES = (2 * 16 * 128 + 16 * 16 + 2 * 16 + 16 * 8 * 16) * 4
COMBINE_SHARED_BYTES = (128 + 4 + 4 * 128 + 512) * 4
Combine = _structure(
    "Combine", parts=_P, states=_P, out=_P, n_heads=_U, value_dim=_U, n_splits=_U, sinks=_P,
    xq=Quantised,
)  # fmt: skip
ARGUMENTS = {
    "norm_rows": Norm, "add_rows": Add, "mix_rows": Mix, "gate_rows": Gate, "rope_rows": Rope,
    "latent_rows": Latent, "embed_rows": Embed, "attend_split": Attend,
    "combine_splits": Combine, "join_states": Join, "column_sums": Columns,
    "mean_rows": Means, "split_signs": Signs, "convolve_rows": Convolve, "keep_inputs": Convolve,
    "delta_gates": DeltaGate, "delta_rule": Delta, "ssd": Ssd,
    **{f"attend_tiles_{dim}": AttendTiles for dim in TILE_DIMS},
    **{f"column_tiles_{dim}": Columns for dim in TILE_DIMS},
    **{f"multiply_{name}": Multiply for name in FORMATS},
    **{f"gemm_{name}": Multiply for name in FORMATS if name.startswith("q")},
    **{f"gemm_tall_{name}": Multiply for name in TALL_FORMATS},
}  # fmt: skip


def gemm_shared_bytes(name: str, n_rows: int) -> int:
    """Shared memory of a block of ``n_rows`` rows: 64, or 128 of gemm_tall."""
    n_parts = (4 if "small" in name else 2) * (2 if name.endswith("min") else 1)
    return 3 * (n_rows * (64 + 2 * 4) + 4 * (128 * int(name[1]) + 16 * n_parts * 2))


def attend_shared_bytes(n_heads: int, key_dim: int) -> int:
    """Shared memory of a block of attend_split: queries, logits of 128 keys, and its scratch."""
    return n_heads * (key_dim + 128) * 4 + 16 * 128 * 4


def tile_dim(key_dim: int, value_dim: int) -> int:
    """Columns of the tiles that take such heads: which of the kernels by tiles it is."""
    return next(dim for dim in TILE_DIMS if max(key_dim, value_dim) <= dim)


def attend_tiles_bytes(dim: int) -> int:
    """Shared memory of a block of attend_tiles: 64 queries in halves, tiles of keys and values."""
    n_keys = 64 if dim <= 128 else 32
    return 2 * (64 + n_keys) * dim * 2


def column_tiles_bytes(dim: int) -> int:
    """Shared memory of a block of column_tiles: 64 keys, and their sums of four warps."""
    return 64 * (dim * 2 + 4 * 4)


def column_parts(n_rows: int) -> int:
    """Parts of so many rows whose sums column_tiles leaves to be added up."""
    return -(-n_rows // 256)


def multiply_threads(name: str) -> int:
    """Threads of a block of the products with vectors, for weights in a format."""
    return 256 if name.startswith("q") else 128


class DeviceError(Exception):
    """What a call of the driver answered."""


class Device:
    """A device of a driver library: memory, and kernels that run one after the other."""

    def __init__(self, library: Path) -> None:
        self.driver = ctypes.CDLL(str(library))
        self._call("cuInit", c_uint(0))
        context, capability = c_void_p(), (ctypes.c_int(), ctypes.c_int())
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(0))
        self._call("cuCtxSetCurrent", context)
        for value, attribute in zip(capability, (75, 76), strict=True):
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, ctypes.c_int(0))
        self.is_emulated = hasattr(self.driver, "edgeh2o_argument_bytes")
        self._stream = c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._stream), c_uint(1))
        self._module = c_void_p()
        image = b"\x7fELF"
        if not self.is_emulated:
            image = choose_image((capability[0].value, capability[1].value)).read()
        self._call("cuModuleLoadData", ctypes.byref(self._module), image)
        self._held: set[int] = set()
        self._functions: dict[tuple[int | None, str], tuple[c_void_p, int]] = {}

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self.driver, name)(*arguments)
        if error:
            raise DeviceError(f"{name}: error {error}")

    def argument_bytes(self, kernel: str) -> int:
        function = self.driver.edgeh2o_argument_bytes
        function.restype = c_size_t
        return int(function(kernel.encode()))

    def empty(self, n_bytes: int) -> int:
        """An address of n_bytes that hold NaN."""
        pointer = c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), c_size_t(n_bytes))
        self._held.add(pointer.value)
        return pointer.value

    def free(self, address: int) -> None:
        """Gives memory back, once all that was launched is done."""
        self.wait()
        self._held.remove(address)
        self._call("cuMemFree_v2", c_uint64(address))

    def free_all(self) -> None:
        """Gives back whatever is held."""
        for address in list(self._held):
            self.free(address)

    def wait(self) -> None:
        """Until all that was launched is done."""
        self._call("cuStreamSynchronize", self._stream)

    def attribute(self, number: int) -> int:
        """One of ``CUdevice_attribute``."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, ctypes.c_int(0))
        return value.value

    def load(self, image: bytes) -> c_void_p:
        """A module of other kernels, for ``launch_of``: a cubin, or PTX."""
        module = c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        return module

    def put(self, array: NDArray[Any]) -> int:
        """The address of a copy."""
        array = np.ascontiguousarray(array)
        address = self.empty(max(1, array.nbytes))
        data = array.ctypes.data_as(c_void_p)
        size = c_size_t(array.nbytes)
        self._call("cuMemcpyHtoDAsync_v2", c_uint64(address), data, size, self._stream)
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A copy of what lies there."""
        array = np.zeros(shape, dtype)
        data, size = array.ctypes.data_as(c_void_p), c_size_t(array.nbytes)
        self._call("cuMemcpyDtoHAsync_v2", data, c_uint64(address), size, self._stream)
        self.wait()
        return array

    def launch(
        self,
        kernel: str,
        arguments: Structure,
        grid: tuple[int, ...],
        threads: int = 128,
        shared: int = 0,
    ) -> None:
        """Runs a kernel; what it wrote is read by ``get``."""
        self.launch_of(self._module, kernel, arguments, grid, threads, shared)

    def launch_of(
        self,
        module: c_void_p,
        kernel: str,
        arguments: ctypes.Structure,
        grid: tuple[int, ...],
        threads: int,
        shared: int = 0,
    ) -> None:
        """The same with a kernel of another module."""
        function, most_shared = self._functions.get((module.value, kernel), (None, 0))
        if function is None:
            function = c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        if shared > max(most_shared, 48 * 1024):
            self._call("cuFuncSetAttribute", function, 8, shared)
        self._functions[module.value, kernel] = function, max(shared, most_shared)
        pointers = (c_void_p * 1)(ctypes.addressof(arguments))
        sizes = [c_uint(n) for n in (*grid, *(1,) * (3 - len(grid)), threads, 1, 1, shared)]
        function_type = ctypes.CFUNCTYPE(
            ctypes.c_int, c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p
        )
        launch = function_type(("cuLaunchKernel", self.driver))
        error = launch(function, *sizes, self._stream, pointers, None)
        if error:
            raise DeviceError(f"{kernel}: error {error}")

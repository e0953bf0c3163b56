"""Matrix products: by a vector and by many rows."""

from __future__ import annotations

from collections.abc import Iterator

from tools.cuda_driver import (
    FORMATS,
    TALL_FORMATS,
    Device,
    Multiply,
    Structure,
    gemm_shared_bytes,
    multiply_threads,
)

from .case import Case, Sizes, put_matrix, put_rows


def products(device: Device, sizes: Sizes) -> Iterator[Case]:
    """Matrices by a vector, bound by memory, and by many rows, bound by tensor cores."""
    for name in FORMATS:
        is_quantised = name.startswith("q")
        n_out = sizes.n_out if is_quantised else sizes.n_out // 4
        matrix, n_bytes = put_matrix(device, name, n_out, sizes.dim)
        rows, row_bytes = put_rows(device, 1, sizes.dim)
        x, out = device.empty(sizes.dim * 4), device.empty(n_out * 4)
        grid = (n_out // (16 if is_quantised else 4), 1)
        arguments = Multiply(
            w=matrix, x=x, xq=rows, out=out, x_stride=sizes.dim, out_stride=n_out, n_rows=1
        )

        def multiply(
            kernel: str = f"multiply_{name}",
            a: Structure = arguments,
            grid: tuple[int, ...] = grid,
            threads: int = multiply_threads(name),
        ) -> None:
            device.launch(kernel, a, grid, threads, 512)

        moved = n_bytes + row_bytes + n_out * 4
        yield Case(f"multiply_{name}", "bytes", moved, multiply)
        device.free_all()
    for name in (name for name in FORMATS if name.startswith("q")):
        matrix, _ = put_matrix(device, name, sizes.dim, sizes.dim)
        rows, _ = put_rows(device, sizes.n_rows, sizes.dim)
        out = device.empty(sizes.n_rows * sizes.dim * 4)
        arguments = Multiply(w=matrix, xq=rows, out=out, out_stride=sizes.dim, n_rows=sizes.n_rows)
        for kernel, block_rows in (("gemm", 64), ("gemm_tall", 128)):
            if kernel == "gemm_tall" and name not in TALL_FORMATS:
                continue
            grid = (sizes.dim // 64, -(-sizes.n_rows // block_rows))

            def gemm(
                kernel: str = f"{kernel}_{name}",
                a: Structure = arguments,
                grid: tuple[int, ...] = grid,
                shared: int = gemm_shared_bytes(name, block_rows),
            ) -> None:
                device.launch(kernel, a, grid, shared=shared)

            yield Case(f"{kernel}_{name}", "s8", 2.0 * sizes.n_rows * sizes.dim**2, gemm)
        device.free_all()

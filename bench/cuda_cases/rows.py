"""What is done row by row, and the layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tools.cuda_driver import (
    SSD_SHARED_BYTES,
    Add,
    Cache,
    Convolve,
    Delta,
    Device,
    Gate,
    Heads,
    Norm,
    Rope,
    Ssd,
    Structure,
)

from .case import Case, Sizes, put_rows


def row_kernels(device: Device, sizes: Sizes) -> Iterator[Case]:
    """What is done row by row, bound by memory."""
    n, dim, ffn_dim = sizes.n_single, sizes.dim, sizes.ffn_dim
    x = device.put(np.full((n, dim), 0.5, np.float32))
    y = device.put(np.full((n, dim), 0.5, np.float32))
    weight = device.put(np.ones(dim, np.float32))
    rows, row_bytes = put_rows(device, n, dim)
    norm = Norm(
        x=x, weight=weight, xq=rows, dim=dim, n_groups=1, x_stride=dim, out_stride=dim, eps=1e-5
    )
    add = Add(x=x, y=y, weight=weight, dim=dim, eps=1e-5, scale=1.0)
    gate, up = (device.put(np.full((n, ffn_dim), 0.5, np.float32)) for _ in range(2))
    wide, wide_bytes = put_rows(device, n, ffn_dim)
    gated = Gate(gate=gate, up=up, xq=wide, dim=ffn_dim, gate_stride=ffn_dim)
    head_dim, n_pairs = sizes.head_dim, sizes.head_dim // 2
    n_heads, n_kv = sizes.n_heads, sizes.n_kv_heads
    stride = (n_heads + 2 * n_kv) * head_dim
    table = device.put(np.full((n, n_pairs), 0.5, np.float32))
    k, v = (device.empty(n_kv * n * head_dim * 2) for _ in range(2))
    rope = Rope(
        qkv=device.put(np.full((n, stride), 0.5, np.float32)), cos=table, sin=table,
        cache=Cache(k=k, v=v, max_context=n), stride=stride, n_pairs=n_pairs,
        heads=Heads(n_heads=n_heads, n_kv_heads=n_kv, key_dim=head_dim, value_dim=head_dim),
    )  # fmt: skip
    rope_bytes = 2 * n * stride * 4 + 2 * n_kv * n * head_dim * 2
    for name, arguments, grid, threads, n_bytes in (
        ("norm_rows", norm, (n,), 256, n * dim * 4 + row_bytes),
        ("add_rows", add, (n,), 128, 3 * n * dim * 4),
        ("gate_rows", gated, (n, -(-ffn_dim // 512)), 128, 2 * n * ffn_dim * 4 + wide_bytes),
        ("rope_rows", rope, (n_heads + 2 * n_kv, n), 32, rope_bytes),
    ):

        def launch(
            name: str = name,
            a: Structure = arguments,
            grid: tuple[int, ...] = grid,
            threads: int = threads,
        ) -> None:
            device.launch(name, a, grid, threads=threads, shared=512)

        yield Case(name, "bytes", n_bytes, launch)
    device.free_all()


def recurrent(device: Device, sizes: Sizes) -> Iterator[Case]:
    """A convolution between gates, bound by memory; a delta net and Mamba-2 over a prompt."""
    n, dim, n_taps = sizes.n_single, sizes.dim, 4
    rows = device.put(np.full((n, 3 * dim), 0.5, np.float32))
    convolved = Convolve(
        x=rows, gate=rows + 4 * dim, factor=rows + 8 * dim, out=device.empty(n * dim * 4),
        weights=device.put(np.full((n_taps, dim), 0.1, np.float32)),
        state=device.put(np.zeros((n_taps - 1, dim), np.float32)),
        stride=3 * dim, channels=dim, n_taps=n_taps, n_rows=n,
    )  # fmt: skip
    head_dim, n_heads, n_keys = sizes.head_dim, sizes.n_heads, sizes.n_heads // 2
    stride = (2 * n_keys + n_heads) * head_dim
    random = np.random.default_rng(2)
    qkv = random.normal(scale=head_dim**-0.5, size=(n, stride)).astype(np.float32)
    state = np.zeros((n_heads, head_dim, head_dim), np.float32)
    ruled = Delta(
        qkv=device.put(qkv), gates=device.put(np.full((n, 2, n_heads), 0.5, np.float32)),
        state=device.put(state), out=device.empty(n * n_heads * head_dim * 4), stride=stride,
        n_rows=n, n_key_heads=n_keys, n_value_heads=n_heads, head_dim=head_dim,
    )  # fmt: skip
    shared = (head_dim * 36 + 3 * 128) * 4

    columns = 16  # of a slice of the state; neighbouring heads share what writes to it and reads it
    inner, n_groups = n_heads * head_dim, max(1, n_heads // 16)
    width = inner + 2 * n_groups * head_dim
    small = device.put(np.full(n_heads, -0.1, np.float32))
    scanned = Ssd(
        rows=device.put(np.full((n, width), 0.1, np.float32)),
        rates=device.put(np.full((n, n_heads), 0.1, np.float32)),
        a=small, biases=small, skips=small, state=device.put(state),
        out=device.empty(n * inner * 4), stride=width, rate_stride=n_heads, n_rows=n,
        n_heads=n_heads, n_groups=n_groups, head_dim=head_dim, state_dim=head_dim,
    )  # fmt: skip

    def scan() -> None:
        device.launch("ssd", scanned, (head_dim // columns, n_heads), shared=SSD_SHARED_BYTES)

    def convolve() -> None:
        device.launch("convolve_rows", convolved, (-(-dim // 128), n))

    def rule() -> None:
        device.launch("delta_rule", ruled, (head_dim // 32, n_heads), shared=shared)

    yield Case("convolve_rows", "bytes", 4 * n * dim * 4, convolve)
    # Of every number of a state: two products, its decay and what is added.
    yield Case("delta_rule", "f32", 7.0 * n * n_heads * head_dim**2, rule)
    # One product less: nothing is taken from a state before it is written to.
    yield Case("ssd", "f32", 5.0 * n * n_heads * head_dim**2, scan)
    device.free_all()

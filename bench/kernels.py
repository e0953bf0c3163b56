"""How much of the machine's peaks the kernels reach: of computing, on one thread, and of memory.

The peaks are measured: chains of independent products in registers, float and 8-bit. Matrix
products have the shapes of a model; attention is one layer's prefill with everything that belongs
to it (packing of the keys, softmax, scores, selection). Figures are the best of all rounds, because
a limit is compared with a limit. `bench.memory_bound` has what memory bounds: the products of one
and of a few rows, and the attention of decode.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from edgeh2o import _core, _kernels
from edgeh2o import isa as isa_module
from edgeh2o.evaluation.reporting import markdown_table
from edgeh2o.host.threads import default_thread_count

from .memory_bound import (
    format_decode_attention,
    format_memory_bound,
    measure_decode_attention,
    measure_memory_bound,
)
from .reporting import run_script, write_report

# SmolLM2-135M: q, k and v in one; gate and up in one; down.
SHAPES = ((960, 576), (3072, 576), (576, 1536))
TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0")
N_HEADS, N_KV_HEADS, HEAD_DIM = 9, 3, 64


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--isa", help="one instruction set (default: all but scalar)")
    parser.add_argument(
        "--types",
        default=",".join(TYPES),
        help="tensor types of the products of many rows (default: %(default)s)",
    )
    parser.add_argument(
        "--memory-types",
        default=",".join(_core.supported_types()),
        help="tensor types of the tables of memory's bandwidth, or none (default: all)",
    )
    parser.add_argument("--rows", type=int, default=512, help="rows of activations")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the attention")
    parser.add_argument("-r", type=int, default=20, help="rounds")
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    return parser


def main() -> int:
    """Measures and prints the tables; returns the exit code."""
    args = build_parser().parse_args()
    isas = [args.isa] if args.isa else [i for i in _core.available_isas() if i != "scalar"]
    memory_types = [] if args.memory_types == "none" else args.memory_types.split(",")
    few_rounds = max(1, args.r // 4)  # of 256 MiB each
    memory_bound = [
        record
        for isa in isas
        for record in measure_memory_bound(isa, memory_types, default_thread_count(), few_rounds)
    ]
    decode = [
        record
        for isa in (isas if memory_types else [])
        for record in measure_decode_attention(isa, default_thread_count(), few_rounds)
    ]
    _core.set_num_threads(1)
    _kernels.set_num_threads(1)
    peaks = {isa: measure_peaks(isa, args.r) for isa in isas}
    products = [
        record
        for isa in isas
        for type_name in args.types.split(",")
        for record in measure_products(isa, type_name, args.rows, args.r, peaks[isa])
    ]
    layers = [record for isa in isas for record in measure_attention(isa, args.tokens, peaks[isa])]
    tables = [_format_peaks(peaks), _format_products(products), _format_attention(layers)]
    if memory_bound:
        tables += [format_memory_bound(memory_bound), format_decode_attention(decode)]
    results: dict[str, Any] = {"peaks": peaks, "products": products, "attention": layers}
    write_report(
        args.output, tables, results | {"memory_bound": memory_bound, "decode_attention": decode}
    )
    return 0


def best_rate(operations: Callable[[], int], n_rounds: int) -> float:
    """The highest operations/s of ``n_rounds`` calls, each of which returns its operations."""
    rates = []
    for _ in range(n_rounds):
        started_at = time.perf_counter()
        n_operations = operations()
        rates.append(n_operations / (time.perf_counter() - started_at))
    return max(rates)


def measure_peaks(isa: str, n_rounds: int) -> dict[str, float]:
    """Operations/s of float products and of 8-bit activations with 4- and 8-bit weights."""
    isa_module.use(isa)
    kinds = (*_core.attention_precisions(), "q4", "q8")
    return {
        kind: best_rate(lambda kind=kind: _kernels.peak(isa, kind, 20_000), n_rounds)
        for kind in kinds
    }


def measure_products(
    isa: str, type_name: str, n_rows: int, n_rounds: int, peaks: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Rates of the quantised matrix product, and what the rounding of its input costs beside it."""
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape
    from gguf.constants import GGML_QUANT_SIZES

    random = np.random.default_rng(0)
    quantisation = GGMLQuantizationType[type_name]
    for n_out, depth in SHAPES:
        block_size, _ = GGML_QUANT_SIZES[quantisation]
        depth = -(-depth // block_size) * block_size
        shape = quant_shape_to_byte_shape((n_out, depth), quantisation)
        # Any bytes make weights: speed depends on denormal scales only, bytes below 8 of MXFP4.
        data = random.integers(8, 64, shape, np.uint8).ravel()
        weights = _kernels.Weights(isa, type_name, data, n_out, depth)
        x = random.standard_normal((n_rows, depth)).astype(np.float32)
        rounding_s, product_s = weights.measure(x, n_rounds).min(axis=0)
        rate = 2 * n_rows * n_out * depth / product_s
        peak = peaks["q4" if type_name.startswith("Q4") else "q8"]
        yield {
            "isa": isa,
            "type": type_name,
            "shape": f"{n_rows} x {depth} x {n_out}",
            "operations_per_s": rate,
            "share_of_peak": rate / peak,
            "rounding_share": rounding_s / product_s,
        }


def measure_attention(isa: str, n_tokens: int, peaks: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Rates of one layer's prefill: dense, and the plan's rule in chunks of 1,024 and 256."""
    isa_module.use(isa)
    random = np.random.default_rng(0)
    q = random.standard_normal((n_tokens, N_HEADS, HEAD_DIM)).astype(np.float32)
    k, v = random.standard_normal((2, n_tokens, N_KV_HEADS, HEAD_DIM)).astype(np.float32)
    for precision, (name, chunk_size) in product(
        _core.attention_precisions(),
        (("dense", 1024), ("h2o", 1024), ("h2o", 256)),
    ):
        best_s = np.inf
        for _ in range(3):
            policy = _core.dense_policy() if name == "dense" else _core.h2o_policy(256, 256)
            attention = _core.ChunkedAttention(
                policy,
                N_HEADS,
                N_KV_HEADS,
                HEAD_DIM,
                chunk_size=chunk_size,
                batch_size=n_tokens,
                max_context=n_tokens,
                precision=precision,
            )
            started_at = time.perf_counter()
            attention.run(0, q, k, v, is_last=True)
            best_s = min(best_s, time.perf_counter() - started_at)
        # Two products of head_dim for each pair and query head.
        rate = 4 * N_HEADS * HEAD_DIM * attention.pairs_computed / best_s
        yield {
            "isa": isa,
            "attention": f"{name}, S = {chunk_size:,}, {precision}",
            "operations_per_s": rate,
            "share_of_peak": rate / peaks[precision],
        }


def _format_peaks(peaks: dict[str, dict[str, float]]) -> str:
    kinds = {
        "f32": "f32",
        "bf16": "bf16",
        "f16": "f16",
        "int8": "int8 attention",
        "int16": "int16 attention",
        "q4": "8-bit x 4-bit",
        "q8": "8-bit x 8-bit",
    }
    header = ["ISA", *(f"{name} Gop/s" for name in kinds.values())]
    rows = [
        [isa, *(f"{of[kind] / 1e9:,.0f}" if kind in of else "-" for kind in kinds)]
        for isa, of in peaks.items()
    ]
    title = "Peaks of one thread, a multiplication and an addition counted as two:"
    return f"{title}\n\n{markdown_table(header, rows)}"


def _format_products(records: list[dict[str, Any]]) -> str:
    header = ["ISA", "type", "rows x depth x outputs", "Gop/s", "of peak", "rounding of the input"]
    rows = [
        [
            *(record[key] for key in ("isa", "type", "shape")),
            f"{record['operations_per_s'] / 1e9:,.0f}",
            f"{record['share_of_peak']:.0%}",
            f"+{record['rounding_share']:.0%}",
        ]
        for record in records
    ]
    return "Quantised matrix products:\n\n" + markdown_table(header, rows)


def _format_attention(records: list[dict[str, Any]]) -> str:
    header = ["ISA", "attention", "Gflop/s", "of peak"]
    rows = [
        [
            record["isa"],
            record["attention"],
            f"{record['operations_per_s'] / 1e9:,.0f}",
            f"{record['share_of_peak']:.0%}",
        ]
        for record in records
    ]
    return "Attention of one layer, everything included:\n\n" + markdown_table(header, rows)


if __name__ == "__main__":
    run_script(main)

"""What memory bounds, against its measured bandwidth: matrix products of one and of a few rows, and
the attention of decode.

Every figure is taken on several matrices in turn that do not fit into the caches, as the matrices
of a model do not, and is the best of all rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from edgeh2o import _core, _kernels
from edgeh2o import isa as isa_module
from edgeh2o.evaluation.reporting import markdown_table

MIB = 2**20
# Far more than the last cache of a small machine.
BUFFER_BYTES = 256 * MIB
SHAPE = (2048, 8192)  # outputs and depth: ffn_down of Llama-3.2-1B
FEW_ROWS = (2, 3, 4, 8, 16)
# Query heads, KV heads and dimensions of SmolLM2-135M and Llama-3.1-8B.
ATTENTION_HEADS = ((9, 3, 64), (32, 8, 128))
CACHE_TYPES = ("f16", "q8_0", "q8_0/f16")
CHUNK_SIZE = 4096
FEW_ROWS_TYPES = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16")


def thread_counts(n_cores: int) -> list[int]:
    """1, 2 and 4 threads, as far as there are cores."""
    return [n for n in (1, 2, 4) if n <= n_cores]


def measure_bandwidth(isa: str, n_threads: int, n_rounds: int) -> float:
    """Bytes/s that threads read from memory, in a simple sum."""
    _kernels.set_num_threads(n_threads)
    return BUFFER_BYTES / float(_kernels.measure_read(isa, BUFFER_BYTES, n_rounds).min())


class Matrices:
    """As many matrices of one type as fill BUFFER_BYTES, all of the same bytes of a file."""

    def __init__(self, isa: str, type_name: str) -> None:
        from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

        n_out, self.depth = SHAPE
        byte_shape = quant_shape_to_byte_shape(SHAPE, GGMLQuantizationType[type_name])
        # Any bytes make weights: speed does not depend on them.
        data = np.random.default_rng(0).integers(0, 60, byte_shape, np.uint8).ravel()
        first = _kernels.Weights(isa, type_name, data, n_out, self.depth)
        n_matrices = max(1, BUFFER_BYTES // first.n_bytes)
        others = (
            _kernels.Weights(isa, type_name, data, n_out, self.depth) for _ in range(n_matrices - 1)
        )
        self._weights = [first, *others]
        self.n_bytes = n_matrices * first.n_bytes
        self.file_ratio = first.n_bytes / data.size

    def seconds(self, n_rows: int, n_rounds: int) -> float:
        """What the products of n_rows with every matrix take, rounding of the input included."""
        x = np.random.default_rng(1).standard_normal((n_rows, self.depth), np.float32)
        rounds = (
            sum(float(weights.measure(x, 1).sum()) for weights in self._weights)
            for _ in range(n_rounds)
        )
        return min(rounds)


def measure_memory_bound(
    isa: str, types: Sequence[str], n_cores: int, n_rounds: int
) -> Iterator[dict[str, Any]]:
    """A record per type and number of threads: the share of the bandwidth that one row reaches,
    and what few rows cost in times of one row."""
    bandwidths = {n: measure_bandwidth(isa, n, n_rounds) for n in thread_counts(n_cores)}
    for type_name in types:
        matrices = Matrices(isa, type_name)
        for n_threads, bandwidth in bandwidths.items():
            _kernels.set_num_threads(n_threads)
            one_s = matrices.seconds(1, n_rounds)
            rate = matrices.n_bytes / one_s
            yield {
                "isa": isa,
                "type": type_name,
                "threads": n_threads,
                "bytes_over_file": matrices.file_ratio,
                "bandwidth": bandwidth,
                "bytes_per_s": rate,
                "share_of_bandwidth": rate / bandwidth,
                "times_of_one_row": {
                    n: matrices.seconds(n, n_rounds) / one_s
                    for n in (FEW_ROWS if type_name in FEW_ROWS_TYPES else ())
                },
            }


class Caches:
    """The caches of layers of long prompts, BUFFER_BYTES and more in all."""

    N_TOKENS = 32_000  # long, so that a call of Python costs nothing beside a layer

    def __init__(self, heads: tuple[int, int, int], cache_type: str, n_threads: int) -> None:
        n_heads, n_kv_heads, head_dim = heads
        random = np.random.default_rng(0)
        self._q = random.standard_normal((CHUNK_SIZE, n_heads, head_dim), np.float32)
        self._kv = random.standard_normal((2, CHUNK_SIZE, n_kv_heads, head_dim), np.float32)
        layer_bytes = 4 * self.N_TOKENS * n_kv_heads * head_dim  # of f16
        self._n_layers = -(-BUFFER_BYTES // layer_bytes)
        self._attention = _core.ChunkedAttention(
            _core.dense_policy(),
            n_heads,
            n_kv_heads,
            head_dim,
            n_layers=self._n_layers,
            chunk_size=CHUNK_SIZE,
            batch_size=CHUNK_SIZE,
            max_context=self.N_TOKENS + 64,
            cache_type=cache_type,
            threads=n_threads,
        )
        for layer, begin in product(range(self._n_layers), range(0, self.N_TOKENS, CHUNK_SIZE)):
            n = min(CHUNK_SIZE, self.N_TOKENS - begin)
            k, v = self._kv[:, :n]
            # A window of one: only the rows are wanted.
            is_last = begin + n == self.N_TOKENS
            self._attention.run(layer, self._q[:n], k, v, window=1, is_last=is_last)
        self.n_bytes = self._attention.cache.n_bytes * self.N_TOKENS // (self.N_TOKENS + 64)

    def seconds(self, n_rounds: int) -> float:
        """What one token takes in all layers; at most 64 rounds."""
        k, v = self._kv[:, :1]
        best_s = np.inf
        for _ in range(n_rounds):
            started_at = time.perf_counter()
            for layer in range(self._n_layers):
                self._attention.decode(layer, self._q[:1], k, v)
            best_s = min(best_s, time.perf_counter() - started_at)
        return best_s


def measure_decode_attention(isa: str, n_cores: int, n_rounds: int) -> Iterator[dict[str, Any]]:
    """A record per shape of heads, type of cache and number of threads: the share of the bandwidth
    at which a generated token reads the cache."""
    isa_module.use(isa)
    bandwidths = {n: measure_bandwidth(isa, n, n_rounds) for n in thread_counts(n_cores)}
    for heads, cache_type, n_threads in product(ATTENTION_HEADS, CACHE_TYPES, bandwidths):
        caches = Caches(heads, cache_type, n_threads)
        rate = caches.n_bytes / caches.seconds(n_rounds)
        yield {
            "isa": isa,
            "heads": "{}/{} x {}".format(*heads),
            "cache_type": cache_type,
            "threads": n_threads,
            "bandwidth": bandwidths[n_threads],
            "bytes_per_s": rate,
            "share_of_bandwidth": rate / bandwidths[n_threads],
        }


def _format_rate(record: dict[str, Any]) -> list[str]:
    """What is read, what the memory gives, and the share: GB/s, GB/s, percent."""
    return [
        f"{record['bytes_per_s'] / 1e9:.1f}",
        f"{record['bandwidth'] / 1e9:.1f}",
        f"{record['share_of_bandwidth']:.0%}",
    ]


def format_decode_attention(records: Sequence[dict[str, Any]]) -> str:
    """A table of the records of ``measure_decode_attention``."""
    header = ["ISA", "heads x dim", "cache", "threads", "GB/s", "memory gives GB/s", "of it"]
    rows = [
        [
            *(record[key] for key in ("isa", "heads", "cache_type", "threads")),
            *_format_rate(record),
        ]
        for record in records
    ]
    return (
        f"Attention of a generated token to {Caches.N_TOKENS:,}:\n\n{markdown_table(header, rows)}"
    )


def format_memory_bound(records: Sequence[dict[str, Any]]) -> str:
    """Two tables: one row of every type, and few rows."""
    header = ["ISA", "type", "threads", "memory / file", "GB/s", "memory gives GB/s", "of it"]
    one_row = [
        [
            *(record[key] for key in ("isa", "type", "threads")),
            f"{record['bytes_over_file']:.2f}",
            *_format_rate(record),
        ]
        for record in records
    ]
    few_rows = [
        [
            *(record[key] for key in ("isa", "type", "threads")),
            *(f"{times:.2f}" for times in record["times_of_one_row"].values()),
        ]
        for record in records
        if record["times_of_one_row"]
    ]
    few_header = ["ISA", "type", "threads", *(f"{n} rows" for n in FEW_ROWS)]
    n_out, depth = SHAPE
    return (
        f"One row times matrices of {n_out:,} x {depth:,} that lie in memory:\n\n"
        f"{markdown_table(header, one_row)}\n\n"
        f"A few rows, times the time of one:\n\n{markdown_table(few_header, few_rows)}"
    )

"""Prefill and decode in tokens per second, dense and sparse, as llama-bench measures them.

No tokenisation and no sampling is timed. Dense and sparse take turns, so that a slow moment of the
machine falls on both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..attention.base import SparseAttentionConfig
from ..attention.dense import DenseConfig
from ..engine.models import weight_sizes
from ..errors import UsageError
from .filler import filler_tokens
from .progress import Progress
from .reading import prefill_prompt
from .reporting import format_samples, markdown_table

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM
    from ..runners.base import Runner


@dataclass(frozen=True, slots=True)
class Workload:
    """``n_prompt`` tokens of prefill, or ``n_decode`` of decoding after ``depth`` tokens."""

    n_prompt: int = 0
    n_decode: int = 0
    depth: int = 0

    @property
    def name(self) -> str:
        """As llama-bench names it: pp512, tg64, tg64 @ d8000."""
        if self.n_prompt:
            return f"pp{self.n_prompt}"
        return f"tg{self.n_decode}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def n_cached(self) -> int:
        """Tokens that are prefilled, timed or not; decoding needs one before it at least."""
        return self.n_prompt or max(1, self.depth)

    @property
    def n_positions(self) -> int:
        """Tokens that the context has to hold."""
        return self.n_cached + self.n_decode


def plan_workloads(
    n_prompts: Sequence[int], n_decodes: Sequence[int], depths: Sequence[int]
) -> list[Workload]:
    """A prefill of every length, and every decode after every depth; zeros ask for nothing.

    Raises UsageError for negative numbers and when nothing is left to measure.
    """
    lowest = min((*n_prompts, *n_decodes, *depths), default=0)
    if lowest < 0:
        raise UsageError(f"numbers of tokens must be at least 0, got {lowest}")
    workloads = [Workload(n_prompt=n) for n in n_prompts if n]
    workloads += [Workload(n_decode=n, depth=depth) for n in n_decodes if n for depth in depths]
    if not workloads:
        raise UsageError("nothing to measure: give prompt lengths (-p) or tokens to decode (-n)")
    return workloads


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """One workload with one attention. ``memory_bytes`` is what was allocated, by purpose.

    ``cache_bytes_per_token`` were read of the cache for a decoded token; None for prompts, and
    where that is not counted.
    """

    model: str
    isa: str
    threads: int
    mode: str
    attention: str
    batch_size: int
    chunk_size: int
    cache_type: str
    attention_precision: str
    workload: Workload
    keys_per_query: float
    samples_tps: tuple[float, ...]
    memory_bytes: Mapping[str, int]
    cache_bytes_per_token: float | None = None

    @property
    def median_tps(self) -> float:
        """Median of the samples, tokens per second."""
        return statistics.median(self.samples_tps)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        record = self.to_record()
        return record | {
            "samples_tps": list(self.samples_tps),
            "memory_bytes": dict(self.memory_bytes),
        }

    def to_record(self) -> dict[str, Any]:
        """One flat record, fit for CSV."""
        return {
            "model": self.model,
            "isa": self.isa,
            "threads": self.threads,
            "mode": self.mode,
            "attention": self.attention,
            "batch_size": self.batch_size,
            "chunk_size": self.chunk_size,
            "cache_type": self.cache_type,
            "attention_precision": self.attention_precision,
            "test": self.workload.name,
            "n_prompt": self.workload.n_prompt,
            "n_decode": self.workload.n_decode,
            "depth": self.workload.depth,
            "keys_per_query": self.keys_per_query,
            "median_tps": self.median_tps,
            "low_tps": min(self.samples_tps),
            "high_tps": max(self.samples_tps),
            "memory_bytes": sum(self.memory_bytes.values()),
            "cache_bytes_per_token": self.cache_bytes_per_token,
        }


def format_throughput(results: Sequence[Throughput]) -> str:
    """A Markdown table with one row per result."""
    header = ["model", "ISA", "threads", "attention", "test", "keys/query", "memory MiB"]
    header += ["cache MiB/token"] if any(r.cache_bytes_per_token for r in results) else []
    header.append("tokens/s, median (range)")
    rows: list[list[Any]] = [
        [
            result.model,
            result.isa,
            result.threads,
            result.attention,
            result.workload.name,
            f"{result.keys_per_query:,.0f}",
            f"{sum(result.memory_bytes.values()) / 2**20:,.0f}",
            *_format_cache_bytes(result, header),
            format_samples(result.samples_tps, digits=1),
        ]
        for result in results
    ]
    return markdown_table(header, rows)


def _format_cache_bytes(result: Throughput, header: Sequence[str]) -> list[str]:
    if "cache MiB/token" not in header:
        return []
    n_bytes = result.cache_bytes_per_token
    return [f"{n_bytes / 2**20:,.1f}" if n_bytes else ""]


def benchmark_throughput(
    llm: LLM,
    workloads: Sequence[Workload],
    *,
    repetitions: int = 3,
    modes: Sequence[str] = ("dense", "sparse"),
    text: str | None = None,
    warm_up: bool = True,
    on_progress: OnProgress | None = None,
) -> list[Throughput]:
    """Times every workload, with full attention ("dense") and with that of ``llm`` ("sparse").

    The tokens are those of ``text``, repeated as needed, or of a text that edgeh2o makes.
    A model of which nothing is known is profiled on them if they are enough.
    ``warm_up`` runs every workload once before it is timed. ``on_progress("evaluate", done,
    total)`` counts tokens. Raises UsageError for an unknown mode or no repetition.
    """
    unknown = [mode for mode in modes if mode not in ("dense", "sparse")]
    if unknown or not modes:
        raise UsageError(f"modes are dense and sparse, got {', '.join(unknown) or 'none'}")
    if repetitions < 1:
        raise UsageError(f"repetitions must be at least 1, got {repetitions}")
    tokens = filler_tokens(llm, max(workload.n_positions for workload in workloads), text)
    if "sparse" in modes:
        llm.profile_budgets(tokens)  # a model of which nothing is known would be read dense
    n_rounds = repetitions + warm_up
    n_positions = sum(workload.n_positions for workload in workloads)
    progress = Progress(on_progress, n_rounds * len(modes) * n_positions)
    results = []
    for workload in workloads:
        attentions: dict[str, SparseAttentionConfig] = {
            mode: DenseConfig() if mode == "dense" else llm.attention for mode in modes
        }
        runners = {
            mode: llm.start_runner(
                workload.n_positions, n_prompt=workload.n_cached, attention=attention
            )
            for mode, attention in attentions.items()
        }
        samples: dict[str, list[float]] = {mode: [] for mode in modes}
        for round_number in range(n_rounds):
            for mode, runner in runners.items():
                seconds = _time(runner, tokens, workload)
                if round_number >= warm_up:
                    samples[mode].append((workload.n_prompt or workload.n_decode) / seconds)
                progress.advance(workload.n_positions)
        results += [
            Throughput(
                model=llm.model_path.name,
                isa=llm.isa if llm.device == "cpu" else llm.device,
                threads=llm.threads,
                mode=mode,
                attention=_describe(llm, attentions[mode], workload),
                batch_size=runner.batch_size,
                chunk_size=runner.chunk_size,
                cache_type=llm.cache_type,
                attention_precision=llm.choose_precision(workload.n_cached, attentions[mode]),
                workload=workload,
                keys_per_query=runner.pairs_computed / workload.n_cached,
                samples_tps=tuple(samples[mode]),
                memory_bytes={**weight_sizes(llm.model), **runner.memory_bytes},
                # Of all rounds, the one that warms up included.
                cache_bytes_per_token=runner.decode_bytes / (n_rounds * workload.n_decode)
                if workload.n_decode and runner.decode_bytes
                else None,
            )
            for mode, runner in runners.items()
        ]
    return results


def _describe(llm: LLM, attention: SparseAttentionConfig, workload: Workload) -> str:
    """With the budget of its prompts, if nobody has said one."""
    resolved = llm.resolve_attention(workload.n_cached, attention)
    return attention.naming_budget(resolved).describe()


def _time(runner: Runner, tokens: NDArray[np.int32], workload: Workload) -> float:
    """Seconds of one run, until the logits after the last token are there."""
    cached = tokens[: workload.n_cached]
    if workload.n_prompt:
        started_at = time.perf_counter()
        prefill_prompt(runner, cached)
        return time.perf_counter() - started_at
    prefill_prompt(runner, cached)
    to_decode = tokens[workload.n_cached : workload.n_positions].tolist()
    started_at = time.perf_counter()
    for token in to_decode:
        runner.decode(token)
    return time.perf_counter() - started_at

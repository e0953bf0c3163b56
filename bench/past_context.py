"""Loss over texts longer than the context: eviction beside shifts of the context.

    python -m bench.past_context MODEL --text NAME=FILE ... [-c 2048] [--factor 2] [--windows N]

Each window has ``factor`` times the context's tokens. Its first context is read as a prompt,
densely; the others are decoded as they stand, each scored before it is appended, and a full cache
makes room:

    evict       --context-full evict: a batch of what received least attention goes
    shift       --context-full shift: half is kept, and read again
    half        llama.cpp's --context-shift: the older half is dropped, and the keys of the rest
                are rotated to their new positions
    half keep 4 the same with --keep 4: after the first four tokens
    recent      the oldest batch after four sinks goes (StreamingLLM)
    everything  a context that holds the whole window, dense

The loss is the mean negative log-likelihood, in nats, of the tokens behind the first context; the
differences to ``half`` are paired over tokens. ``half`` is a rule in Python on our kernels: no
program of llama.cpp scores a given text past its context.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeh2o import LLM, DenseConfig, SparseAttentionConfig, _core, python_policy
from edgeh2o.engine.full_context import allow_eviction, make_room, shift_context
from edgeh2o.engine.generate import log_probability
from edgeh2o.evaluation.comparison import standard_error
from edgeh2o.evaluation.reading import prefill_prompt
from edgeh2o.evaluation.reporting import format_estimate, markdown_table
from edgeh2o.evaluation.windows import cut_windows
from edgeh2o.runners.base import Runner
from edgeh2o.runners.runner_calls import free_positions

from .reporting import print_progress, run_script, write_report

BASE = "half"

Losses = NDArray[np.float64]


class DropOldest:
    """A rule that drops the oldest tokens after the first ones."""

    def __init__(self, n_first: int) -> None:
        self._n_first = n_first

    def select_memory(
        self, layer: int, kv_head: int, chunk: tuple[int, int], *_: object
    ) -> NDArray[np.int32]:
        return np.arange(chunk[0], dtype=np.int32)

    def evict(
        self, layer: int, kv_head: int, n_dropped: int, scores: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        return np.arange(self._n_first, self._n_first + n_dropped, dtype=np.int32)


@dataclass(frozen=True)
class RuleConfig(SparseAttentionConfig):
    """A rule in Python, made anew for every runner."""

    algorithm = "rule"
    make_rule: Callable[[], object]

    def make_policy(self, model: object) -> _core.SparsePolicy:
        return python_policy(self.make_rule())


@dataclass(frozen=True, slots=True)
class Way:
    """How a full cache makes room: ``make_room(runner)``."""

    name: str
    attention: SparseAttentionConfig
    make_room: Callable[[Any], object]
    evicts: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Mean loss in nats, and what is added to that of ``half``, in percent; standard errors."""

    text: str
    way: str
    loss: float
    loss_error: float
    difference_percent: float | None
    difference_error: float | None
    seconds: float


def _drop_half(n_kept: int) -> Callable[[Any], None]:
    return lambda runner: runner.evict((runner.max_context - n_kept) // 2)


def _shift(runner: Runner) -> None:
    shift_context(runner, runner.max_context, runner.batch_size, stays_open=False)


def _oldest_after(n_first: int) -> RuleConfig:
    return RuleConfig(lambda: DropOldest(n_first))


def ways() -> list[Way]:
    return [
        Way("evict", DenseConfig(), lambda runner: make_room(runner, 1), True),
        Way("shift", DenseConfig(), _shift, False),
        Way(BASE, _oldest_after(0), _drop_half(0), True),
        Way("half keep 4", _oldest_after(4), _drop_half(4), True),
        Way("recent", _oldest_after(4), lambda runner: make_room(runner, 1), True),
    ]


def score(runner: Runner, window: NDArray[np.int32], n_prompt: int, way: Way | None) -> Losses:
    """Losses of the tokens of ``window`` after its first ``n_prompt``."""
    if way is not None:
        allow_eviction(runner, way.evicts)
    logits, losses = prefill_prompt(runner, window[:n_prompt]), []
    for token in window[n_prompt:]:
        losses.append(-log_probability(logits, int(token)))
        if way is not None and free_positions(runner) == 0:
            way.make_room(runner)
        logits = runner.decode(int(token))
    return np.array(losses)


def measure(llm: LLM, name: str, windows: NDArray[np.int32], context: int) -> list[Result]:
    losses: dict[str, Losses] = {}
    seconds = {}
    for way in [*ways(), None]:
        label = way.name if way else "everything"
        begun_at = time.perf_counter()
        parts = []
        for window in windows:
            size = context if way else len(window)
            runner = llm.start_runner(size, attention=way.attention if way else DenseConfig())
            parts.append(score(runner, window, context, way))
        losses[label] = np.concatenate(parts)
        seconds[label] = time.perf_counter() - begun_at
        print_progress(f"{name}, {label}: {losses[label].mean():.4f} ({seconds[label]:.0f} s)")
    base = losses[BASE]
    results = []
    for label, values in losses.items():
        more = None if label == BASE else 100 * (values - base) / base.mean()
        results.append(
            Result(
                name,
                label,
                float(values.mean()),
                standard_error(values),
                None if more is None else float(more.mean()),
                None if more is None else standard_error(more),
                seconds[label],
            )
        )
    return results


def format_results(results: Sequence[Result]) -> str:
    header = ["text", "full cache", "loss, nats", "against half"]
    rows = []
    for r in results:
        more = ""
        if r.difference_percent is not None and r.difference_error is not None:
            more = format_estimate(r.difference_percent, r.difference_error, sign="+") + " %"
        rows.append([r.text, r.way, format_estimate(r.loss, r.loss_error, 3), more])
    return markdown_table(header, rows)


def parse_text(argument: str) -> tuple[str, str]:
    """A name, and the text of its file."""
    name, _, path = argument.partition("=")
    try:
        return name, Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{argument!r} is not NAME=FILE: {error}") from None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=parse_text, action="append", required=True)
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("--factor", type=int, default=2, help="contexts of a window (default: 2)")
    parser.add_argument("--windows", type=int, default=1, help="of each text (default: 1)")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    args = parser.parse_args()
    results = []
    with LLM(args.model, attention=DenseConfig(), threads=args.threads) as llm:
        for name, text in args.text:
            windows = cut_windows(llm, text, args.factor * args.ctx_size, args.windows)
            results += measure(llm, name, windows, args.ctx_size)
    write_report(args.output, [format_results(results)], [asdict(result) for result in results])
    return 0


if __name__ == "__main__":
    run_script(main)

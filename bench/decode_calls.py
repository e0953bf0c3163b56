"""What a decode call of several tokens costs, in calls of one, beside a prompt.

    python -m bench.decode_calls MODEL [-d TOKENS] [--rows 2,3,4,6,8] [-r ROUNDS]

Of drafted tokens all count, or half of them: what is left out of a recurrent state costs the call
behind it, which is shown too. Needs no llama.cpp.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, cast

import numpy as np

from edgeh2o.evaluation.reading import prefill_prompt
from edgeh2o.evaluation.reporting import markdown_table
from edgeh2o.formats.model_cache import resolve_model
from edgeh2o.llm import LLM

from .prefill import DEFAULT_TEXT, parse_sizes
from .reporting import print_progress, run_script

if TYPE_CHECKING:
    from edgeh2o.runners.base import BatchRunner


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode_calls", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-d", "--depth", type=int, default=1528, help="tokens of the prompt")
    parser.add_argument(
        "--rows", type=parse_sizes, default=(2, 3, 4, 6, 8), help="tokens of a call"
    )
    parser.add_argument("-r", "--rounds", type=int, default=20)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--isa", help="instruction set")
    return parser


def measure(
    runner: BatchRunner, rows: tuple[int, ...], n_rounds: int, tokens: list[int]
) -> tuple[float, list[list[str]]]:
    """Seconds of a call of one token, and a table row for every number of tokens: medians."""
    singles: list[float] = []
    times: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for _ in range(n_rounds):
        singles.append(_time(lambda: runner.decode(tokens[0])))
        for n_rows in rows:
            for counts_all in (True, False):
                call = np.array(tokens[:n_rows], np.int32)
                seconds = _time(lambda call=call: runner.decode_batch(call))  # type: ignore[misc]
                runner.accept(n_rows - 1 if counts_all else (n_rows - 1) // 2)
                behind = _time(lambda: runner.decode(tokens[0]))
                times.setdefault((n_rows, counts_all), []).append((seconds, behind))
    one = median(singles)
    table = []
    for n_rows in rows:
        whole, half = times[n_rows, True], times[n_rows, False]
        table.append(
            [
                str(n_rows),
                f"{median(seconds for seconds, _ in whole + half) / one:.2f}",
                f"{median(behind for _, behind in whole) / one:.2f}",
                f"{median(behind for _, behind in half) / one:.2f}",
            ]
        )
    return one, table


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    """Prints a table; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args()
    if min(*args.rows, args.rounds, args.depth) < 1:
        parser.error("--rows, -r and -d are at least 1")
    most = args.depth + args.rounds * sum(2 * n + 2 for n in args.rows) + args.rounds
    options = {"threads": args.threads, "isa": args.isa}
    with LLM(resolve_model(args.model), context_size=most, attention="dense", **options) as llm:
        text = DEFAULT_TEXT.read_text(encoding="utf-8", errors="replace")
        tokens = llm.tokenize(text)[: args.depth]
        if len(tokens) < max(args.depth, *args.rows):
            parser.error(f"-d is at most {len(tokens)}, and no less than --rows")
        runner = cast("BatchRunner", llm.start_runner(most, n_prompt=args.depth))
        if max(args.rows) > runner.max_decode_tokens:
            parser.error(f"--rows are at most {runner.max_decode_tokens} for this model")
        print_progress(f"reading {args.depth} tokens")
        prefill_prompt(runner, np.array(tokens, np.int32))
        one, table = measure(runner, args.rows, args.rounds, list(tokens))
    print(
        f"A call of one token takes {1e3 * one:.1f} ms; in such calls, medians of {args.rounds}:\n"
    )
    columns = ["tokens", "call", "the next if all count", "if half of the drafted ones do"]
    print(markdown_table(columns, table))
    return 0


if __name__ == "__main__":
    run_script(main)

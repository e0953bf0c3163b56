"""All rules on the same windows: what each loses, what it reads, how fast it is.

    python -m bench.rules MODEL --text NAME=FILE ... [--ctx 4096] [--windows N] [--parts quality]

Of every window all but the last 256 tokens are the prompt, read by the rule in chunks that suit it;
the last 256 are decoded as they stand. Losses and KL divergences are against a dense prefill and
dense decode, of the prompt's tokens after the first 1,024 and of the decoded ones. Keys per query
are those of the prompt, bytes those of the f16 cache, and of what a rule chooses by, that a decoded
token reads. Rates are medians of ``--rounds``, rules in turns; they want a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeh2o import (
    LLM,
    DenseConfig,
    H2OConfig,
    HeadwiseConfig,
    PrefillConfig,
    QuestConfig,
    RocketKvConfig,
    RuvllmConfig,
    SparseAttentionConfig,
)
from edgeh2o.evaluation.comparison import TokenScores, WindowComparer, compare_logits, join_scores
from edgeh2o.evaluation.decoding import decode_together
from edgeh2o.evaluation.perplexity import RangeQuality, summarise_parts
from edgeh2o.evaluation.reading import prefill_prompt
from edgeh2o.evaluation.reporting import format_estimate, markdown_table
from edgeh2o.evaluation.windows import cut_windows
from edgeh2o.runners.base import Runner

from .past_context import parse_text
from .reporting import print_progress, run_script, write_report

DENSE = "dense"
RULES: dict[str, SparseAttentionConfig] = {
    DENSE: DenseConfig(),
    "headwise, prefill only": HeadwiseConfig(decode_attention="dense"),
    "headwise, decode too": HeadwiseConfig(decode_attention="headwise"),
    "h2o, 256 + 256": H2OConfig(),
    "snapkv's votes, 256 + 256": H2OConfig(score="window"),
    "quest": QuestConfig(),
    "rocketkv": RocketKvConfig(),
    "ruvllm": RuvllmConfig(),
    "ruvllm in chunks of 64": RuvllmConfig(),
}
CHUNKS = {"ruvllm in chunks of 64": 64}
SKIPPED, DECODED, TIMED = 1024, 256, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rule on the windows of one text; None is what was not measured.

    ``prompt`` is also None where prompts are read densely.
    """

    text: str
    rule: str
    keys_per_query: float
    bytes_per_token: float
    prompt: RangeQuality | None = None
    decoded: RangeQuality | None = None
    prefill_tps: float | None = None
    decode_tps: float | None = None


def start_runner(llm: LLM, rule: str, n_tokens: int, **options: Any) -> Runner:
    attention = RULES[rule]
    chunk = CHUNKS.get(rule, attention.preferred_chunk_size)
    # Whole windows go into one batch, so that the dense side is read once.
    n_batch = -(-n_tokens // chunk) * chunk
    prefill = PrefillConfig(batch_size=n_batch, chunk_size=chunk)
    return llm.start_runner(n_tokens, attention=attention, prefill=prefill, **options)


def measure_quality(
    llm: LLM, text: str, windows: NDArray[np.int32], rules: Sequence[str]
) -> list[Measured]:
    size = windows.shape[1]
    results = []
    comparer = WindowComparer(start_runner(llm, DENSE, size, all_rows=True))
    for rule in rules:
        reads_all = RULES[rule].decoding_densely() == DenseConfig()
        runner = start_runner(llm, rule, size)
        dense = start_runner(llm, DENSE, size)
        prompts: list[TokenScores] = []
        answers: list[TokenScores] = []
        n_pairs, n_bytes = 0, 0
        for window in windows:
            prompt, rest = np.split(window, [size - DECODED])
            if not reads_all:
                rows = start_runner(llm, rule, size, all_rows=True)
                prompts.append(comparer.compare(rows, window, first=SKIPPED))
                del rows
            for each in (runner, dense):
                prefill_prompt(each, prompt)
            n_pairs += runner.pairs_computed
            before = runner.decode_bytes
            parts = [
                compare_logits(exact, ours, rest[first + 1 : first + 1 + len(exact)])
                for first, (exact, ours) in decode_together([dense, runner], rest[:-1], 1)
            ]
            n_bytes += runner.decode_bytes - before
            answers.append(join_scores(parts))
        measured = Measured(
            text=text,
            rule=rule,
            keys_per_query=n_pairs / (len(windows) * (size - DECODED)),
            bytes_per_token=n_bytes / (len(windows) * (DECODED - 1)),
            prompt=_summarise(prompts) if prompts else None,
            decoded=_summarise(answers),
        )
        print_progress(format_results([measured]).splitlines()[-1])
        results.append(measured)
    return results


def _summarise(scores: list[TokenScores]) -> RangeQuality:
    return summarise_parts(scores, {"all": (0, len(scores[0]))})[0]


def measure_speed(
    llm: LLM, text: str, window: NDArray[np.int32], rules: Sequence[str], rounds: int
) -> list[Measured]:
    prompt, rest = np.split(window, [len(window) - DECODED])
    samples: dict[str, list[tuple[float, float]]] = {rule: [] for rule in rules}
    keys, n_bytes = {}, {}
    for _ in range(rounds):
        for rule in rules:
            runner = start_runner(llm, rule, len(window))
            begun_at = time.perf_counter()
            prefill_prompt(runner, prompt)
            read_at = time.perf_counter()
            for token in rest[:TIMED]:
                runner.decode(int(token))
            ended_at = time.perf_counter()
            samples[rule].append((len(prompt) / (read_at - begun_at), TIMED / (ended_at - read_at)))
            keys[rule] = runner.pairs_computed / len(prompt)
            n_bytes[rule] = runner.decode_bytes / TIMED
    return [
        Measured(
            text=text,
            rule=rule,
            keys_per_query=keys[rule],
            bytes_per_token=n_bytes[rule],
            prefill_tps=statistics.median(prefill for prefill, _ in samples[rule]),
            decode_tps=statistics.median(decode for _, decode in samples[rule]),
        )
        for rule in rules
    ]


def format_results(results: Sequence[Measured]) -> str:
    header = ["text", "rule", "keys per query", "prompt: loss", "KL, e-3"]
    header += ["MiB per token", "decoded: loss", "KL, e-3", "prefill, tokens/s", "decode"]
    rows = []
    for r in results:
        rows.append(
            [
                r.text,
                r.rule,
                f"{r.keys_per_query:,.0f}",
                *_format_quality(r.prompt),
                f"{r.bytes_per_token / 2**20:.1f}",
                *_format_quality(r.decoded),
                f"{r.prefill_tps:,.0f}" if r.prefill_tps else "",
                f"{r.decode_tps:,.0f}" if r.decode_tps else "",
            ]
        )
    return markdown_table(header, rows)


def _format_quality(quality: RangeQuality | None) -> tuple[str, str]:
    if quality is None:
        return "", ""
    estimate = partial(format_estimate, digits=1)
    return (
        estimate(quality.loss_percent, quality.loss_percent_error, sign="+") + " %",
        estimate(1e3 * quality.kl, 1e3 * quality.kl_error),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=parse_text, action="append", required=True)
    parser.add_argument("--ctx", type=int, default=4096, help="tokens of a window (default: 4096)")
    parser.add_argument("--windows", type=int, default=1, help="of each text (default: 1)")
    parser.add_argument("--parts", default="quality,speed", help="quality, speed or both")
    parser.add_argument("--rules", help="some of the rules, by names that contain one of these")
    parser.add_argument("--rounds", type=int, default=3, help="of the rates (default: 3)")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    args = parser.parse_args()
    wanted = args.rules.split(",") if args.rules else [""]
    rules = [rule for rule in RULES if any(part in rule for part in wanted)]
    quality, speed = [], []
    with LLM(args.model, threads=args.threads) as llm:
        for name, text in args.text:
            windows = cut_windows(llm, text, args.ctx, args.windows)
            llm.profile_budgets(windows[0])
            if "quality" in args.parts:
                quality += measure_quality(llm, name, windows, rules)
            if "speed" in args.parts:
                speed += measure_speed(llm, name, windows[0], rules, args.rounds)
    tables = [format_results(part) for part in (quality, speed) if part]
    write_report(args.output, tables, [asdict(result) for result in quality + speed])
    return 0


if __name__ == "__main__":
    run_script(main)

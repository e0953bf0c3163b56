"""What generated tokens lose where one KV head reads few of a long prompt's keys.

    python -m bench.decode_heads model.gguf --ctx 8192 --keys 1536
    python -m bench.decode_heads model.gguf --ctx 8192 --keys 2048 --full 33,23 --text-seeds 1

The last 256 tokens of a window are decoded as they stand after the others, densely, and with
``--keys`` in one KV head after the other; heads are numbered through all layers. With ``--full``
all heads but those have so many. What that leaves are ``heads`` of a budget table's ``decode``,
which ``-o json`` gives. The prompt is read once per window, and kept as it lies in the cache, where
runs keep it in q8_0.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from edgeh2o import LLM
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.attention.headwise_settings import DECODE_FROM
from edgeh2o.cli.evaluation_options import list_of
from edgeh2o.errors import UsageError
from edgeh2o.evaluation.comparison import estimate_loss
from edgeh2o.evaluation.decode_heads import WindowDecoder
from edgeh2o.evaluation.decode_meter import DECODED
from edgeh2o.evaluation.long_texts import make_window
from edgeh2o.evaluation.reporting import format_estimate, markdown_table

from .reporting import print_progress, run_script, write_report
from .windows import add_window_options

# Budgets of KV heads, None for the whole past.
Budgets = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One window by the budgets ``heads``: KL in nats, loss and its standard error in percent."""

    kind: str
    seed: int
    limited: str
    kl: float
    loss_percent: float
    loss_percent_error: float
    heads: Budgets


def tried_budgets(n_heads: int, keys: int, full: tuple[int, ...]) -> dict[str, Budgets]:
    """Of every KV head, by which of them have a limit."""
    if full:
        budgets = tuple(None if head in full else keys for head in range(n_heads))
        return {f"all but {len(set(full))}": budgets}
    alone = {head: [None] * n_heads for head in range(n_heads)}
    return {str(h): (*row[:h], keys, *row[h + 1 :]) for h, row in alone.items()}


def measure(llm: LLM, args: argparse.Namespace) -> Iterator[Sample]:
    """Reads every window once, and decodes its end by all budgets."""
    prompt_rule = llm.resolve_attention(args.ctx - DECODED)
    if not isinstance(prompt_rule, HeadwiseConfig) or not prompt_rule.budgets:
        raise UsageError("this is measured of models that attention headwise has budgets for")
    for kind in args.kinds:
        for seed in args.text_seeds:
            window = make_window(llm, kind, args.ctx, seed=seed)
            decoder = WindowDecoder(llm, prompt_rule, window, DECODED)
            for limited, budgets in tried_budgets(llm.config.n_slots, args.keys, args.full).items():
                scores = decoder.compare(budgets)
                loss, error = estimate_loss(scores.sparse_nll - scores.dense_nll)
                yield Sample(kind, seed, limited, float(scores.kl.mean()), loss, error, budgets)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_window_options(parser, ctx=8192, kinds=("pairs",))
    parser.add_argument("--keys", type=int, default=1536, help="of a head with a limit")
    parser.add_argument("--full", type=list_of(int), default=(), help="KV heads without one")
    args = parser.parse_args()
    if args.ctx < DECODE_FROM + DECODED:
        parser.error(f"--ctx must be at least {DECODE_FROM + DECODED}, got {args.ctx}")
    return args


def main() -> int:
    """Measures every window with every budget, prints one table; returns the exit code."""
    args = parse_arguments()
    samples = []
    with LLM(args.model, threads=args.threads) as llm:
        for sample in measure(llm, args):
            print_progress(f"{sample.kind}, {sample.seed}, {sample.limited}: {sample.kl:.5f}")
            samples.append(sample)
    samples.sort(key=lambda sample: -sample.kl)
    rows = [
        [
            sample.kind,
            sample.seed,
            sample.limited,
            f"{1e3 * sample.kl:.2f}",
            format_estimate(sample.loss_percent, sample.loss_percent_error, sign="+"),
        ]
        for sample in samples
    ]
    header = ["text", "seed", f"KV heads of {args.keys:,} keys", "KL, 1e-3", "loss %"]
    write_report(args.output, [markdown_table(header, rows)], [asdict(each) for each in samples])
    return 0


if __name__ == "__main__":
    run_script(main)

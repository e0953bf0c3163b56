"""How well the measured error of the sparse attention tells the loss of the predictions.

    python -m bench.attention_error model.gguf --ctx 2048 --budgets 128,256,512,768 --text-seeds 0

Every kind of text of ``edgeh2o evaluate`` is read with every budget, unguarded; the last
``--scored`` predictions are compared with those of a dense run, and the rank correlation
(Spearman) of loss and KL with what ``GenerationStats.attention_error`` says of the window stands
below the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from edgeh2o import LLM, DenseConfig, HeadwiseConfig
from edgeh2o.cli.evaluation_options import list_of
from edgeh2o.evaluation.comparison import WindowComparer, estimate_loss
from edgeh2o.evaluation.long_texts import KINDS, make_window
from edgeh2o.evaluation.reporting import format_estimate, markdown_table
from edgeh2o.runners.runner_calls import attention_error

from .reporting import print_progress, run_script, write_report
from .windows import add_window_options


@dataclass(frozen=True, slots=True)
class Sample:
    """One window with one budget: loss and its standard error in percent, KL in nats."""

    kind: str
    seed: int
    budget: int
    error_percent: float
    loss_percent: float
    loss_percent_error: float
    kl: float


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks, equal values sharing theirs."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[index]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def measure(llm: LLM, args: argparse.Namespace) -> Iterator[Sample]:
    """Reads every window densely once and with each budget."""
    rules = [HeadwiseConfig(budget=budget) for budget in args.budgets]
    sparse = [llm.start_runner(args.ctx, attention=rule, all_rows=True) for rule in rules]
    dense = llm.start_runner(args.ctx, attention=DenseConfig(), all_rows=True)
    comparer = WindowComparer(dense)
    for seed in args.text_seeds:
        for kind in args.kinds or KINDS:
            window = make_window(llm, kind, args.ctx, seed=seed)
            for budget, runner in zip(args.budgets, sparse, strict=True):
                scores = comparer.compare(runner, window, first=args.ctx - 1 - args.scored)
                loss, error = estimate_loss(scores.sparse_nll - scores.dense_nll)
                measured = attention_error(runner.error_sums) or 0.0
                yield Sample(
                    kind,
                    seed,
                    budget,
                    100 * measured,
                    loss,
                    error,
                    float(scores.kl.mean()),
                )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_window_options(parser, ctx=2048)
    parser.add_argument("--scored", type=int, default=1024, help="last predictions of a window")
    parser.add_argument("--budgets", type=list_of(int), default=(128, 256, 512, 768))
    args = parser.parse_args()
    if not 1 < args.scored < args.ctx:
        parser.error(f"--scored must be between 2 and {args.ctx - 1}, got {args.scored}")
    return args


def main() -> int:
    """Measures every window with every budget, prints one table; returns the exit code."""
    args = parse_arguments()
    samples = []
    with LLM(args.model, threads=args.threads) as llm:
        for sample in measure(llm, args):
            print_progress(str(sample))
            samples.append(sample)
    samples.sort(key=lambda sample: sample.error_percent)
    header = ["text", "seed", "budget", "error of the attention %", "loss %", "KL"]
    rows = [
        [
            sample.kind,
            sample.seed,
            sample.budget,
            f"{sample.error_percent:.2f}",
            format_estimate(sample.loss_percent, sample.loss_percent_error, sign="+"),
            f"{sample.kl:.4f}",
        ]
        for sample in samples
    ]
    errors = [sample.error_percent for sample in samples]
    by_loss = rank_correlation(errors, [sample.loss_percent for sample in samples])
    by_kl = rank_correlation(errors, [sample.kl for sample in samples])
    summary = f"Rank correlation of the error with the loss: {by_loss:.2f}, with KL: {by_kl:.2f}"
    write_report(
        args.output, [markdown_table(header, rows), summary], [asdict(each) for each in samples]
    )
    return 0


if __name__ == "__main__":
    run_script(main)

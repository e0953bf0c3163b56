"""What sparse prefill costs in quality on several files, and that the dense baseline is sound.

    python -m bench.quality model.gguf --text wiki.txt --ctx 4096 --windows 8 \
        --attention headwise --attention headwise:budget=384 --attention h2o --llama-cpp DIR

The numbers are those of ``edgeh2o perplexity``; with ``--llama-cpp`` the dense perplexity stands
beside that of llama-perplexity, which scores the second half of the same windows.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from edgeh2o import LLM, PrefillConfig
from edgeh2o.attention.base import SparseAttentionConfig, describe_settings
from edgeh2o.attention.registry import make_sparse_attention
from edgeh2o.errors import UsageError
from edgeh2o.evaluation.perplexity import PerplexityReport, evaluate_perplexity
from edgeh2o.evaluation.reporting import markdown_table
from edgeh2o.host.threads import default_thread_count

from .llama_cpp import LlamaCpp
from .reporting import existing_file, print_progress, run_script, write_report


@dataclass(frozen=True, slots=True)
class Quality:
    """Our report, and llama.cpp's dense perplexity over the second halves if it was asked for."""

    report: PerplexityReport
    llama_cpp_perplexity: float | None

    @property
    def difference_percent(self) -> float | None:
        """How much larger our dense perplexity is than llama.cpp's."""
        if self.llama_cpp_perplexity is None:
            return None
        ours = self.report.find("second half").dense_perplexity
        return 100 * (ours / self.llama_cpp_perplexity - 1)

    def to_dict(self) -> dict[str, Any]:
        return self.report.to_dict() | {
            "llama_cpp_perplexity": self.llama_cpp_perplexity,
            "difference_percent": self.difference_percent,
        }


def parse_attention(text: str) -> SparseAttentionConfig:
    """An argparse type: an algorithm with its settings, ``headwise:budget=384,local=128``."""
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {"algorithm": name}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        settings[key] = yaml.safe_load(value)
    try:
        return make_sparse_attention(settings)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def measure(path: Path, attention: SparseAttentionConfig, args: argparse.Namespace) -> Quality:
    """Reads the windows with edgeh2o, and with llama.cpp where it is given."""
    text = args.text.read_text(encoding="utf-8")
    with LLM(
        path,
        threads=args.threads,
        prefill=PrefillConfig(chunk_size=args.chunk_size),
        attention=attention,
    ) as llm:
        report = evaluate_perplexity(
            llm, text, context_size=args.ctx, windows=args.windows, skip=args.skip
        )
    print_progress(report.format_text())
    theirs = None
    if args.llama_cpp is not None:
        peer = LlamaCpp(args.llama_cpp, args.threads)
        theirs = peer.perplexity(path, text, context_size=args.ctx, n_windows=args.windows)
    return Quality(report, theirs)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=existing_file, metavar="MODEL")
    parser.add_argument("--text", type=existing_file, required=True, help="UTF-8 text to predict")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--skip", type=int, default=1024, help="report the tokens after these")
    parser.add_argument(
        "--attention",
        type=parse_attention,
        action="append",
        metavar="NAME[:SETTING=VALUE,...]",
        help="may be given several times (default: headwise)",
    )
    parser.add_argument("-ub", "--chunk-size", type=int, default=PrefillConfig().chunk_size)
    parser.add_argument("-t", "--threads", type=int, default=default_thread_count())
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="folder of its programs")
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    args = parser.parse_args()
    if not 0 < args.skip < args.ctx - 2:
        parser.error(f"--skip must be between 1 and {args.ctx - 3}, got {args.skip}")
    return args


def main() -> int:
    """Measures every file and prints one table; returns the exit code."""
    args = parse_arguments()
    attentions = args.attention or [parse_attention("headwise")]
    results = [measure(path, each, args) for path in args.models for each in attentions]
    header = ["model", "attention", "tokens", "keys per query", "dense perplexity"]
    header += ["loss %", "KL", "same top-1 %", "second half", "llama.cpp", "difference %"]
    rows = [_row(result, args.skip) for result in results]
    write_report(args.output, [markdown_table(header, rows)], [r.to_dict() for r in results])
    return 0


def _row(result: Quality, skip: int) -> list[str]:
    """Means over the tokens after ``skip``, then the comparison over the second halves."""
    report = result.report
    after = report.find(f"after {skip}")
    half = report.find("second half")
    theirs, difference = result.llama_cpp_perplexity, result.difference_percent
    return [
        report.model,
        describe_settings(report.attention),
        f"{report.n_windows} x {report.context}",
        f"{report.keys_per_query:,.0f}",
        f"{after.dense_perplexity:.3f}",
        f"{after.loss_percent:+.2f} +- {after.loss_percent_error:.2f}",
        f"{after.kl:.4f} +- {after.kl_error:.4f}",
        f"{after.top1_percent:.1f}",
        f"{half.dense_perplexity:.3f}",
        "-" if theirs is None else f"{theirs:.3f}",
        "-" if difference is None else f"{difference:+.2f}",
    ]


if __name__ == "__main__":
    run_script(main)

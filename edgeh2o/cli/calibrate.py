"""``edgeh2o calibrate``: measures once what every head of a model needs to remember."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FormatError, UsageError
from ..formats.atomic_file import check_writable
from .model_options import (
    add_model_argument,
    add_model_options,
    add_verbosity_options,
    open_model,
    read_model_options,
)
from .prompt import read_text

if TYPE_CHECKING:
    from ..attention.budget_table import BudgetTable
    from ..attention.prefill_quality import PrefillQuality
    from ..attention.rounding_quality import RoundingQuality

HELP = "measure the memory that every head of a model needs"
DESCRIPTION = (
    "Measure the error that every head makes with memory sets of several sizes, "
    "and write the table from which --budget and --max-loss take the budgets. `run` finds it "
    "by itself for every quantisation of the same weights. A calibration that was interrupted goes "
    "on when it is started again."
)
EXAMPLES = """\
  edgeh2o calibrate model.gguf                  once per model
  edgeh2o calibrate model.gguf --length 8192    for longer prompts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    add_model_argument(parser)
    parser.add_argument(
        "--text",
        action="append",
        metavar="FILE",
        help="UTF-8 text to calibrate on; may be given several times (default: manual and source "
        "text that comes with Python)",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=4096,
        metavar="N",
        help="tokens of each text that are read (default: 4096); choose the length to be served",
    )
    parser.add_argument(
        "--decode",
        action=argparse.BooleanOptionalAction,
        help="measure what generated tokens lose that go by the budgets: where it is harmless, "
        "runs decode so by default, after prompts of up to --length tokens, or twice as many where "
        "the model was trained on that (default: if --length suffices for it)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write (default: the cache folder)"
    )
    add_model_options(parser, attention=False)  # that of the table; what is known is made anew
    add_verbosity_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Measures, writes the table, prints its path and the measured losses."""
    options = read_model_options(args)
    texts = [read_text(path, flag="--text") for path in args.text or ()]

    from ..attention.budget_table import table_path, write_table
    from ..evaluation.calibration import calibrate
    from ..evaluation.calibration_notes import NOTES_SUFFIX

    given = Path(args.output) if args.output else None
    check_writable(given or table_path("model"), "-o", makes_folders=True)
    if given is not None:
        _refuse_other_file(given)
    with open_model(options) as (llm, bars):
        path = table_path(llm.config.fingerprint)
        table = calibrate(
            llm,
            texts,
            length=args.length,
            decode=args.decode,
            on_progress=bars,
            notes_path=path.with_name(f"{llm.config.fingerprint}{NOTES_SUFFIX}"),
        )
    path = given or path
    if not args.quiet:
        for budget, loss in sorted(table.losses.items()):
            print(f"--budget {budget:<5} perplexity loss {loss:+.2f} %")
        if table.rounding is not None:
            print(_describe_rounding(table.rounding))
        for measured in table.prefill:
            print(_describe_prefill(measured, is_grown=measured is not table.prefill[0]))
        if line := _describe_decode(table, is_asked_for=args.decode):
            print(line)
    write_table(table, path)
    print(path)
    return 0


def _refuse_other_file(path: Path) -> None:
    """Raises UsageError where the table would replace what is none, such as the model."""
    from ..attention.budget_table import read_table

    if path.is_file() and path.stat().st_size:
        try:
            read_table(path)
        except FormatError:
            raise UsageError(
                f"-o {path} is there and is no budget table; name another file, or remove it"
            ) from None


def _describe_rounding(measured: RoundingQuality) -> str:
    """What attention in 8 bits costs, in a line."""
    text, kl = max(measured.kl.items(), key=lambda item: item[1])
    way = "by default" if measured.is_harmless else "only if asked for"
    return (
        f"int8           perplexity loss {measured.loss:+.2f} %, KL up to {1e3 * kl:.1f}e-3 "
        f"({text}): long prompts are read so {way}"
    )


def _describe_prefill(measured: PrefillQuality, *, is_grown: bool) -> str:
    """What prompts of a length lose, in a line; a budget that ``is_grown`` cannot be asked for."""
    from ..attention.headwise import ERROR_OF_DEFAULT_LOSS, ERROR_OF_PROFILE

    kind, loss = max(measured.loss.items(), key=lambda item: item[1])
    text, kl = max(measured.kl.items(), key=lambda item: item[1])
    limit = ERROR_OF_DEFAULT_LOSS if measured.is_harmless else ERROR_OF_PROFILE
    keys = f"{measured.budget:,} keys" if is_grown else f"--budget {measured.budget:<5}"
    return (
        f"{keys:<14} prompts of up to {measured.length:,} tokens lose up to "
        f"{loss:+.2f} +- {measured.loss_error[kind]:.2f} % ({kind}), KL up to {1e3 * kl:.1f}e-3 "
        f"({text}): guarded at {limit:g} % by default"
    )


def _describe_decode(table: BudgetTable, *, is_asked_for: bool | None) -> str:
    """What ``--decode`` found out, in a line; empty if there is nothing to say."""
    measured = table.decode
    if measured is None:
        text = "decode         not measured: a default run takes none of these budgets"
        return text if is_asked_for else ""
    kind, kl = max(measured.kl.items(), key=lambda item: item[1])
    way = "dense by default"
    if measured.is_harmless:
        way = f"headwise by default after prompts of up to {measured.length:,} tokens"
    keys, spared = f"--budget {measured.budget:<5}", ""
    if measured.heads is not None:
        keys = f"{measured.budget:,} keys"  # cannot be asked for: others read everything
        spared = f", {measured.heads.count(None)} of {len(measured.heads)} KV heads read everything"
    return f"{keys:<14} decode KL up to {1e3 * kl:.1f}e-3 ({kind}){spared}: {way}"

"""``edgeh2o quantize``: writes a model as a GGUF file of another type."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..config import QUANTISED_TYPES
from .report import add_json_option, print_report

HELP = "write a model as a GGUF file of another type"
DESCRIPTION = (
    "Write a GGUF file, or a folder of safetensors, as a GGUF file whose matrices are of TYPE. The "
    "file takes its name when it is complete; an interrupt or a full disk leaves what was there."
)
EXAMPLES = """\
  edgeh2o quantize hf_folder model.gguf q4_k_m
  edgeh2o quantize model-f16.gguf model-q8_0.gguf q8_0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    parser.add_argument("model", metavar="IN", help="GGUF file, or folder of safetensors")
    parser.add_argument("output", metavar="OUT.gguf", type=Path, help="file to write or replace")
    parser.add_argument("type", metavar="TYPE", help=f"one of {', '.join(QUANTISED_TYPES)}")
    parser.add_argument(
        "--allow-requantize",
        action="store_true",
        help="take matrices that are quantised already; errors add up",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Writes the file and says what is in it; returns the exit code."""
    from ..config import check_quantised_type

    type_name = check_quantised_type(args.type)

    from ..export.gguf import quantize_model
    from ..formats.atomic_file import check_writable
    from ..formats.model_cache import resolve_model
    from .leaving import leaving_on_signals
    from .model_options import print_note, show_warnings
    from .progress import progress_on_stderr

    show_warnings()
    check_writable(args.output, "OUT.gguf")
    source = resolve_model(args.model, on_message=None if args.quiet else print_note)
    bars = progress_on_stderr(quiet=args.quiet)
    try:
        with leaving_on_signals():
            report = quantize_model(
                source,
                args.output,
                type_name,
                allow_requantize=args.allow_requantize,
                on_bytes=lambda done, total: bars("quantise", done, total),
            )
    finally:
        bars.close()
    print_report(report, as_json=args.json)
    return 0

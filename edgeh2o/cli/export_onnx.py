"""``edgeh2o export-onnx``: writes a GGUF model as an ONNX model."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write a GGUF model as an ONNX model (onnxruntime-genai layout)"
DESCRIPTION = (
    "Write a GGUF model into a new folder as onnxruntime-genai lays it out: genai_config.json, "
    "model.onnx, its weights, the tokenizer. Attention becomes GroupQueryAttention; matrices of "
    "type Q4_0 and Q8_0 stay as they are (MatMulNBits), others become float32. Needs edgeh2o[onnx]."
)
EXAMPLES = """\
  edgeh2o export-onnx model.gguf onnx_folder"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments and flags."""
    parser.add_argument(
        "model", metavar="MODEL", help="GGUF file, or a known model such as smollm2-135m"
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new or empty folder")
    parser.add_argument(
        "--last-logits-only",
        action="store_true",
        help="give the logits of the last token only: enough to generate, and a faster prefill in "
        "onnxruntime itself",
    )


def execute(args: argparse.Namespace) -> int:
    """Writes the folder and says what is in it; returns the exit code."""
    from ..export.onnx import describe_report, export_model
    from ..formats.model_cache import resolve_model
    from .leaving import leaving_on_signals
    from .model_options import print_note, show_warnings

    show_warnings()
    path = resolve_model(args.model, on_message=print_note)
    with leaving_on_signals():
        report = export_model(path, args.folder, last_logits_only=args.last_logits_only)
    print_note(describe_report(report))
    print(args.folder)
    return 0

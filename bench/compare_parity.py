"""Compares edgeh2o without sparsity with llama.cpp on the same model files.

For every file: token ids, log-probabilities of the second half of each window of a text, and
greedy answers to short prompts. The reference is llama.cpp without flash attention; llama.cpp
with flash attention is measured against it too, to show how far two right answers are apart.
With --exact both sides are also measured against llama.cpp on the same weights written as F32,
which needs 4 bytes of disk per parameter. Exits with 1 when a file misses a tolerance.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edgeh2o.config import ATTENTION_PRECISIONS
from edgeh2o.evaluation.reporting import markdown_table

from .llama_cpp import LlamaCpp
from .log_probabilities import Agreement, WindowLogProbabilities, compare, join
from .parity import GreedyComparison, Tolerances, count_equal, find_faults
from .reporting import existing_file, print_progress, run_script, write_report

if TYPE_CHECKING:
    from .own_model import DenseModel

HERE = Path(__file__).parent
DEFAULT_TEXT = HERE.parent / "examples" / "long_prompt.txt"
ANSWER_CONTEXT = 1024
PROMPTS = sorted((HERE / "prompts").glob("*.txt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileParity:
    """Everything measured on one file.

    ``agreement`` is ours with llama.cpp, ``itself`` llama.cpp's with another of its own runs;
    ``exact`` is llama.cpp's and ours with the result of F32 weights, None if not asked for.
    """

    model: Path
    are_ids_equal: bool
    agreement: Agreement
    itself: Agreement
    exact: tuple[Agreement, Agreement] | None
    greedy: tuple[GreedyComparison, ...]
    faults: tuple[str, ...]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare_parity", description=__doc__)
    parser.add_argument("models", nargs="+", type=existing_file, metavar="MODEL", help="GGUF file")
    parser.add_argument(
        "--llama-cpp", type=Path, required=True, metavar="DIR", help="folder of the programs"
    )
    parser.add_argument(
        "--text", type=existing_file, default=DEFAULT_TEXT, help="at least two windows"
    )
    parser.add_argument("--ctx", type=int, default=512, help="tokens of one window")
    parser.add_argument("--windows", type=int, default=2, help="windows to score")
    parser.add_argument("-n", type=int, default=100, help="greedy tokens of each prompt")
    parser.add_argument("-ub", "--chunk-size", type=int, default=128, help="tokens of our chunks")
    parser.add_argument("--exact", action="store_true", help="measure against F32 weights as well")
    parser.add_argument("-t", "--threads", type=int, default=2, help="threads of both sides")
    parser.add_argument("--isa", help="our instruction set (default: the best of this machine)")
    parser.add_argument(
        "--attention-precision",
        choices=ATTENTION_PRECISIONS,
        default="auto",
        help="of our attention (default: %(default)s)",
    )
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md")
    return parser


def main() -> int:
    """Measures all files, prints the report; returns the exit code."""
    args = build_parser().parse_args()
    peer = LlamaCpp(args.llama_cpp, args.threads)
    tolerances = Tolerances()
    results = []
    for model in args.models:
        print_progress(f"{model.name} ...")
        results.append(_compare_file(model, peer, args, tolerances))
    records = {"tolerances": asdict(tolerances), "files": [_to_record(r) for r in results]}
    write_report(
        args.output,
        [_logits_table(results), _greedy_table(results), _describe_limits(tolerances)],
        records,
    )
    return 1 if any(result.faults for result in results) else 0


def _compare_file(
    model: Path, peer: LlamaCpp, args: argparse.Namespace, tolerances: Tolerances
) -> FileParity:
    from .own_model import DenseModel, load_model

    text = args.text.read_bytes().decode()
    prompts = {path.stem: path.read_bytes().decode() for path in PROMPTS}
    score = partial(
        peer.log_probabilities, text=text, context_size=args.ctx, n_windows=args.windows
    )
    reference = score(model)
    reference_with_flash = score(model, flash_attention=True)
    own = DenseModel(
        load_model(model, threads=args.threads, isa_name=args.isa),
        context_size=max(args.ctx, ANSWER_CONTEXT),
        chunk_size=args.chunk_size,
        precision=args.attention_precision,
    )
    are_ids_equal = _are_ids_equal(own, peer, model, [text, *prompts.values()])
    plain_ids = own.tokenizer.encode(text, parse_special=False)[: reference.tokens.size]
    are_ids_equal = are_ids_equal and plain_ids == reference.tokens.ravel().tolist()
    agreement = _compare_own(reference, own)
    exact = None
    if args.exact:
        with TemporaryDirectory(prefix="edgeh2o-bench-") as folder:
            dequantized = Path(folder) / "f32.gguf"
            peer.dequantize(model, dequantized)
            truth = score(dequantized)
        exact = (_compare_saved(truth, reference), _compare_own(truth, own))
    greedy = tuple(
        _compare_answers(own, peer, model, name, prompt, args.n) for name, prompt in prompts.items()
    )
    itself = _compare_saved(reference, reference_with_flash)
    faults = find_faults(
        are_ids_equal=are_ids_equal,
        agreement=agreement,
        itself=itself,
        greedy=greedy,
        tolerances=tolerances,
    )
    return FileParity(
        model=model,
        are_ids_equal=are_ids_equal,
        agreement=agreement,
        itself=itself,
        exact=exact,
        greedy=greedy,
        faults=tuple(faults),
    )


def _are_ids_equal(own: DenseModel, peer: LlamaCpp, model: Path, texts: list[str]) -> bool:
    return all(
        own.tokenizer.encode(text, parse_special=parse_special)
        == peer.tokenize(model, text, parse_special=parse_special)
        for text in texts
        for parse_special in (True, False)
    )


def _compare_own(reference: WindowLogProbabilities, own: DenseModel) -> Agreement:
    return join(
        [
            compare(
                reference.log_probabilities(window),
                own.window_logits(reference.tokens[window])[reference.first_scored : -1],
                reference.next_tokens(window),
            )
            for window in range(reference.n_windows)
        ]
    )


def _compare_saved(left: WindowLogProbabilities, right: WindowLogProbabilities) -> Agreement:
    return join(
        [
            compare(
                left.log_probabilities(window),
                right.log_probabilities(window),
                left.next_tokens(window),
            )
            for window in range(left.n_windows)
        ]
    )


def _compare_answers(
    own: DenseModel, peer: LlamaCpp, model: Path, name: str, prompt: str, n_tokens: int
) -> GreedyComparison:
    generate = partial(peer.generate_greedily, model, prompt, n_tokens, context_size=ANSWER_CONTEXT)
    theirs, theirs_with_flash = generate(), generate(flash_attention=True)
    ids = own.tokenizer.encode(prompt, parse_special=True)
    ours = own.generate_greedily(ids, n_tokens)
    n_equal = count_equal(ours, theirs)
    gap = None
    if n_equal < n_tokens:
        gap = own.preference([*ids, *ours[:n_equal]], ours[n_equal], theirs[n_equal])
    return GreedyComparison(
        prompt=name,
        n_tokens=n_tokens,
        n_equal=n_equal,
        gap=gap,
        n_equal_itself=count_equal(theirs, theirs_with_flash),
    )


def _logits_table(results: list[FileParity]) -> str:
    columns: list[tuple[str, Callable[[FileParity], str]]] = [
        ("file", lambda result: result.model.name),
        ("ids equal", lambda result: "yes" if result.are_ids_equal else "NO"),
        ("mean KL", lambda result: f"{result.agreement.mean_kl:.1e}"),
        ("own", lambda result: f"{result.itself.mean_kl:.1e}"),
        ("mean, max difference", lambda result: _format_differences(result.agreement)),
        ("own", lambda result: _format_differences(result.itself)),
        ("top-1 agreement", lambda result: f"{result.agreement.top_agreement:.3f}"),
        ("own", lambda result: f"{result.itself.top_agreement:.3f}"),
        ("perplexity llama.cpp", lambda result: f"{result.agreement.reference_perplexity:.3f}"),
        ("edgeh2o", lambda result: f"{result.agreement.perplexity:.3f}"),
        ("KL from exact llama.cpp, edgeh2o", _format_exact),
        ("verdict", lambda result: "; ".join(result.faults) or "pass"),
    ]
    rows = [[format_cell(result) for _, format_cell in columns] for result in results]
    return markdown_table([header for header, _ in columns], rows)


def _format_differences(agreement: Agreement) -> str:
    return f"{agreement.mean_difference:.3f}, {agreement.differences.max():.3f}"


def _format_exact(result: FileParity) -> str:
    if result.exact is None:
        return "-"
    return ", ".join(f"{agreement.mean_kl:.1e}" for agreement in result.exact)


def _greedy_table(results: list[FileParity]) -> str:
    names = [answer.prompt for answer in results[0].greedy]
    rows = [
        [result.model.name, *(_format_answer(answer) for answer in result.greedy)]
        for result in results
    ]
    n_tokens = results[0].greedy[0].n_tokens
    explanation = (
        f"First equal greedy tokens of {n_tokens}; at a difference, by how many nats we prefer "
        "our token (in a new prefill, so it may be negative: a tie); in brackets: llama.cpp's own."
    )
    return explanation + "\n\n" + markdown_table(["file", *names], rows)


def _format_answer(answer: GreedyComparison) -> str:
    gap = "" if answer.gap is None else f", {answer.gap:.3f} nats"
    return f"{answer.n_equal}{gap} [{answer.n_equal_itself}]"


def _describe_limits(tolerances: Tolerances) -> str:
    return (
        f"Limits: equal ids; KL and difference at most {tolerances.spread:g} times llama.cpp's own "
        f"(or {tolerances.least_kl:g} and {tolerances.least_difference:g} nats); top-1 agreement "
        f"at most {tolerances.top_agreement:g} below its own; perplexity within "
        f"{tolerances.perplexity:.0%}; where greedy answers part, we prefer our token by at most "
        f"{tolerances.spread:g} times its own largest difference (or {tolerances.least_gap:g} "
        'nats). "Own" is llama.cpp with flash attention against llama.cpp without.'
    )


def _to_record(result: FileParity) -> dict[str, Any]:
    exact = result.exact or ()
    return {
        "file": result.model.name,
        "are_ids_equal": result.are_ids_equal,
        "agreement": _summarise(result.agreement),
        "llama_cpp_with_itself": _summarise(result.itself),
        "exact": dict(zip(("llama_cpp", "edgeh2o"), map(_summarise, exact), strict=False)),
        "greedy": [asdict(answer) for answer in result.greedy],
        "faults": list(result.faults),
    }


def _summarise(agreement: Agreement) -> dict[str, float]:
    return {
        "n_scored": len(agreement.kl_divergence),
        "mean_kl": agreement.mean_kl,
        "max_kl": float(agreement.kl_divergence.max()),
        "mean_difference": agreement.mean_difference,
        "max_difference": float(agreement.differences.max()),
        "top_agreement": agreement.top_agreement,
        "reference_perplexity": agreement.reference_perplexity,
        "perplexity": agreement.perplexity,
    }


if __name__ == "__main__":
    run_script(main)

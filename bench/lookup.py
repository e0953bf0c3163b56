"""Prompt lookup and draft models: decode speed with and without, on four kinds of answers.

    python -m bench.lookup MODEL [-n TOKENS] [-r ROUNDS] [--temp X] [--lookup auto|N|off]
                           [--draft FILE [--draft-tokens auto|N]]

Texts are those that come with every Python: its manual and its standard library. The answers with
and without are compared, and must be equal.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from statistics import median

from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams

from .reporting import print_progress, run_script, write_report

CHARACTERS = 6500  # of a text: about 1,600 tokens
TOPICS = ("assignment", "exceptions", "import")
FUNCTIONS = (
    ("textwrap", "TextWrapper._split_chunks", "_split_chunks", "split_into_chunks"),
    ("shutil", "_copyfileobj_readinto", "length", "n_bytes"),
    ("fractions", "Fraction.limit_denominator", "max_denominator", "largest_denominator"),
)
QUESTIONS = (
    "Which statements or constructs does this text describe? Answer with sentences of the text.",
    "Quote the three most important sentences of this text word for word.",
    "What does this text say about errors and exceptions? Quote the sentences.",
)
OPEN = (
    "Write a short story about a lighthouse keeper and a storm.",
    "Give me advice for learning to play the piano as an adult.",
    "Explain to a child why the sky is blue.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of answer; rates are decoded tokens per second, medians over rounds and prompts."""

    kind: str
    prompt_tokens: int
    plain_tps: float
    lookup_tps: float
    speedup: float
    tokens_per_call: float
    accepted_share: float


def make_prompts() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Kinds, and their prompts: a message, and how the answer begins."""
    topics = import_module("pydoc_data.topics").topics
    texts = [topics[name][:CHARACTERS] for name in TOPICS]
    yield "summary", [(f"Summarise this text.\n\n{text}", "") for text in texts]
    yield "code edit", [_ask_for_edit(*names) for names in FUNCTIONS]
    yield (
        "question about a text",
        [(f"{text}\n\n{question}", "") for text, question in zip(texts, QUESTIONS, strict=True)],
    )
    yield "open chat", [(message, "") for message in OPEN]


def _ask_for_edit(module: str, name: str, old: str, new: str) -> tuple[str, str]:
    """A small model does not get to the point by itself: the answer begins with the function."""
    owner = import_module(module)
    source = inspect.getsource(owner)[:3000]
    for part in name.split("."):
        owner = getattr(owner, part)
    function = inspect.getsource(owner)
    message = (
        f"This is the beginning of the Python module {module}:\n\n```python\n{source}\n```\n\n"
        f"Rename `{old}` to `{new}` in this function and write out the whole function:\n\n"
        f"```python\n{function}\n```"
    )
    return message, f"```python\n{function.splitlines()[0].replace(old, new)}\n"


def measure(
    llm: LLM,
    kind: str,
    prompts: Sequence[tuple[str, str]],
    sampling: dict[str, object],
    drafts: dict[str, str],
    n: int,
) -> Row:
    """Decodes every prompt ``n`` times each way, in turns."""
    rates: dict[str, list[list[float]]] = {"without": [], "with": []}
    ways = {"without": {"lookup": "off", "draft_tokens": "off"}, "with": drafts}
    calls = tokens = drafted = accepted = prompt_tokens = 0
    for message, beginning in prompts:
        prompt = llm.chat_template.render([{"role": "user", "content": message}]).text + beginning
        answers = set()
        for rate in rates.values():
            rate.append([])
        for _ in range(n):
            for how, rate in rates.items():
                params = SamplingParams(**{**sampling, **ways[how]})
                result = llm.generate(prompt, params, keep_cache=True)  # read once
                answers.add(result.token_ids)
                stats = result.stats
                rate[-1].append(stats.decode_tps or 0.0)
                if how == "with":
                    calls += stats.decode_calls or stats.generated_tokens - 1
                    tokens += stats.generated_tokens - 1
                    drafted += stats.drafted_tokens
                    accepted += stats.accepted_tokens
                    prompt_tokens = max(prompt_tokens, stats.prompt_tokens)
        if len(answers) > 1:
            raise AssertionError(f"{kind}: drafts changed an answer")
    plain, found = (median(map(median, rate)) for rate in rates.values())
    speedup = median(median(b) / median(a) for a, b in zip(*rates.values(), strict=True))
    return Row(
        kind, prompt_tokens, plain, found, speedup, tokens / calls, accepted / max(1, drafted)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-n", "--max-tokens", type=int, default=200)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-d", "--padding", type=int, default=0, help="sentences of filler in front")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--lookup", default="auto")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--draft-tokens", default="auto")
    parser.add_argument("--attention", default="dense")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args()
    sampling = {"temperature": args.temp, "seed": 1, "max_tokens": args.max_tokens}
    from edgeh2o.evaluation.filler import write_filler
    from edgeh2o.formats.model_cache import resolve_model

    rows = []
    drafts = {"lookup": args.lookup, "draft_tokens": args.draft_tokens}
    model, options = resolve_model(args.model), {"draft": args.draft, "attention": args.attention}
    with LLM(model, threads=args.threads, **options) as llm:
        front = write_filler(args.padding) + "\n\n" if args.padding else ""
        for kind, prompts in make_prompts():
            print_progress(kind)
            padded = [(front + message, beginning) for message, beginning in prompts]
            rows.append(measure(llm, kind, padded, sampling, drafts, args.rounds))
    table = [
        "| answer | prompt | without, tokens/s | with | speedup | tokens per call | accepted |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {row.kind} | {row.prompt_tokens:,} | {row.plain_tps:.0f} | {row.lookup_tps:.0f} | "
            f"{row.speedup:.2f}x | {row.tokens_per_call:.2f} | {row.accepted_share:.0%} |"
            for row in rows
        ),
    ]
    write_report(args.output, ["\n".join(table)], [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    run_script(main)

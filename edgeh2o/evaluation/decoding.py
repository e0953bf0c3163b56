"""What a rule for generated tokens costs: the end of a text, decoded token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..runners.base import RunnerState
from .comparison import TokenScores, compare_logits, join_scores
from .perplexity import PerplexityReport, RangeQuality, summarise_parts
from .progress import Progress
from .reading import prefill_prompt
from .windows import DEFAULT_CONTEXT, cut_windows

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM
    from ..runners.base import BatchRunner, Runner

MIN_DECODED = 4


def evaluate_decoding(
    llm: LLM,
    text: str,
    n_decoded: int,
    *,
    context_size: int = DEFAULT_CONTEXT,
    windows: int | None = None,
    on_progress: OnProgress | None = None,
) -> PerplexityReport:
    """Compares what ``llm`` decodes with its own dense decode after the same sparse prefill.

    Of every window of ``context_size`` tokens the last ``n_decoded`` are decoded, the true ones
    whatever is predicted; the others are the prompt. Raises UsageError for an attention whose
    decode is dense, and for windows that do not fit, ResourceError where memory does not suffice.
    """
    check_decoded(n_decoded, context_size)
    n_prompt = context_size - n_decoded
    require_decode_rule(llm, n_prompt)
    tokens = cut_windows(llm, text, context_size, windows)
    llm.profile_budgets(tokens[0])
    runners = start_decoders(llm, context_size, n_prompt)
    progress = Progress(on_progress, 2 * tokens.size)
    pairs_computed, pairs_dense, scores = 0, 0, []
    for window in tokens:
        scores += compare_decodes(runners, window, n_decoded, on_tokens=progress.advance)
        pairs_computed += runners[1].pairs_computed
        pairs_dense += runners[1].pairs_dense
    return PerplexityReport(
        model=llm.model_path.name,
        attention=llm.report_attention(n_prompt),
        chunk_size=runners[1].chunk_size,
        context=context_size,
        n_windows=len(tokens),
        pairs_computed=pairs_computed,
        pairs_dense=pairs_dense,
        ranges=_summarise(scores),
        windows=tuple(_summarise([window]) for window in scores),
    )


def check_decoded(n_decoded: int, context_size: int) -> None:
    """Raises UsageError for numbers of tokens to decode that a window does not have."""
    if not MIN_DECODED <= n_decoded < context_size:
        raise UsageError(
            f"the tokens to decode (--decode) must be at least {MIN_DECODED} and less than the "
            f"{context_size} of a window, got {n_decoded}"
        )


def require_decode_rule(llm: LLM, n_prompt: int) -> None:
    """Raises UsageError for an attention that decodes densely after so long a prompt."""
    attention = llm.resolve_attention(n_prompt)
    if attention.decoding_densely() == attention:
        raise UsageError(
            "this attention decodes densely: there is nothing to compare; use "
            "--decode-attention headwise"
        )


def start_decoders(llm: LLM, context_size: int, n_prompt: int) -> list[Runner]:
    """A runner that decodes densely after the prefill of ``llm``, and one that decodes as it does.

    Both have the budgets of a prompt of ``n_prompt`` tokens. Raises ResourceError where memory does
    not suffice for them.
    """
    # Budgets and all: a rule may want others than dense decode does.
    dense = llm.resolve_attention(n_prompt).decoding_densely()
    return [
        llm.start_runner(context_size, n_prompt=n_prompt, attention=each) for each in (dense, None)
    ]


def compare_decodes(
    runners: list[Runner],
    window: NDArray[np.int32],
    n_decoded: int,
    *,
    on_tokens: Callable[[int], None],
    shares_prompt: bool = False,
) -> list[TokenScores]:
    """Scores of the last ``n_decoded`` - 1 tokens of ``window`` [n], decoded as they stand.

    The first of ``runners``, such as those of ``start_decoders``, is what the others are compared
    with: one result for each of these. Runners by whose rules the prompt is read alike take it from
    the last one if it ``shares_prompt``. ``on_tokens`` counts to n for every runner.
    """
    prompt, rest = np.split(window, [len(window) - n_decoded])
    *others, last = runners
    prefill_prompt(last, prompt)
    on_tokens(len(prompt))
    for runner in others:
        if not (shares_prompt and RunnerState.copy(last, runner)):
            prefill_prompt(runner, prompt)
        on_tokens(len(prompt))
    parts: list[list[TokenScores]] = [[] for _ in runners[1:]]
    for first, (dense, *rules) in decode_together(runners, rest[:-1]):
        targets = rest[first + 1 : first + 1 + len(dense)]
        for own, logits in zip(parts, rules, strict=True):
            own.append(compare_logits(dense, logits, targets))
        on_tokens(len(runners) * len(dense))
    on_tokens(len(runners))
    return [join_scores(own) for own in parts]


def _summarise(scores: list[TokenScores]) -> tuple[RangeQuality, ...]:
    n_scored = len(scores[0])
    half = n_scored // 2
    return summarise_parts(
        scores, {"decoded": (0, n_scored), "first half": (0, half), "second half": (half, n_scored)}
    )


def decode_together(
    runners: list[Runner], tokens: NDArray[np.int32], most: int | None = None
) -> Iterator[tuple[int, list[NDArray[np.float32]]]]:
    """Index of a block of ``tokens``, and its logits [n, vocab_size] of every runner.

    As many tokens go together as the runners take, or ``most``.
    """
    step = min(most or len(tokens), *(runner.max_decode_tokens for runner in runners))
    for first in range(0, len(tokens), step):
        block = tokens[first : first + step]
        yield first, [decode_block(runner, block) for runner in runners]


def decode_block(runner: Runner, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Appends ``tokens`` [n], at most ``max_decode_tokens``; logits [n, vocab_size] after each."""
    if len(tokens) == 1:
        return runner.decode(int(tokens[0]))[None]
    together = cast("BatchRunner", runner)
    logits = together.decode_batch(tokens)
    together.accept(len(tokens) - 1)
    return logits

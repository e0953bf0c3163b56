"""Decoding after a sparse prefill: is the greedy text the one that follows a dense prefill?

Two dense prefills that are cut into other chunks round differently, and with activations of 8 bits
greedy texts part for that alone. Their agreement is measured beside that of the attention under
test: it is the floor, which no attention can be asked to beat.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..attention.base import describe_settings
from ..attention.dense import DenseConfig
from ..config import PrefillConfig
from ..errors import UsageError
from .comparison import compare_logits, standard_error
from .progress import Progress
from .reading import prefill_prompt
from .reporting import format_count, format_estimate, markdown_table
from .windows import DEFAULT_CONTEXT, cut_windows

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM
    from ..runners.base import Runner

DEFAULT_PROMPTS = 20
DEFAULT_TOKENS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAgreement:
    """One prompt, against greedy decoding after the dense prefill.

    ``n_equal`` first tokens are the same, of ``n_tokens``. ``margin`` is how much more probable
    the dense run finds its own token than the other one, where the texts part: in nats, None if
    they do not. ``first_kl`` is KL(dense || other) of the first token's distribution, in nats.
    """

    n_tokens: int
    n_equal: int
    margin: float | None
    first_kl: float

    @property
    def is_equal(self) -> bool:
        """Whether the whole texts are equal."""
        return self.n_equal == self.n_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """All prompts of one attention."""

    attention: dict[str, Any]
    chunk_size: int
    prompts: tuple[PromptAgreement, ...]

    def summary(self) -> dict[str, Any]:
        """Equal texts in percent, medians of where texts part, mean first-token KL; with errors.

        Errors are standard errors over the prompts. ``median_margin`` is None if no text parts.
        """
        equal = np.array([100.0 * prompt.is_equal for prompt in self.prompts])
        kl = np.array([prompt.first_kl for prompt in self.prompts])
        margins = [prompt.margin for prompt in self.prompts if prompt.margin is not None]
        root = np.sqrt(len(self.prompts))
        return {
            "prompts": len(self.prompts),
            "equal_percent": float(equal.mean()),
            "equal_percent_error": float(equal.std() / root),
            "median_equal_tokens": float(np.median([p.n_equal for p in self.prompts])),
            "median_margin": float(np.median(margins)) if margins else None,
            "first_kl": float(kl.mean()),
            "first_kl_error": standard_error(kl) if len(kl) > 1 else 0.0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementReport:
    """``sparse``, the attention under test, and ``floor``, dense in the same chunks.

    Both are compared with dense in the chunks that dense runs take by themselves.
    """

    model: str
    context: int
    n_tokens: int
    sparse: Agreement
    floor: Agreement

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON: summaries and every prompt."""
        return {
            "model": self.model,
            "context": self.context,
            "n_tokens": self.n_tokens,
            **{
                name: {**asdict(agreement), "summary": agreement.summary()}
                for name, agreement in (("sparse", self.sparse), ("floor", self.floor))
            },
        }

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record per prompt, fit for CSV."""
        pairs = zip(self.sparse.prompts, self.floor.prompts, strict=True)
        return [
            {
                "prompt": index,
                **{f"sparse_{name}": value for name, value in asdict(sparse).items()},
                **{f"floor_{name}": value for name, value in asdict(floor).items()},
            }
            for index, (sparse, floor) in enumerate(pairs)
        ]

    def format_text(self) -> str:
        """A heading and a row per attention, without a final newline."""
        prompts = format_count(len(self.sparse.prompts), "prompt")
        heading = (
            f"{self.model}: {prompts} of {self.context:,} tokens, "
            f"{self.n_tokens} greedy tokens against those after a dense prefill"
        )
        header = ["prefill", "chunks", "equal texts %", "equal tokens (median)"]
        header += ["margin where they part (median)", "KL of the first token"]
        return f"{heading}\n\n{markdown_table(header, [_row(self.sparse), _row(self.floor)])}"


def _row(agreement: Agreement) -> list[str]:
    summary = agreement.summary()
    margin = summary["median_margin"]
    return [
        describe_settings(agreement.attention),
        f"{agreement.chunk_size:,}",
        format_estimate(summary["equal_percent"], summary["equal_percent_error"], 0),
        f"{summary['median_equal_tokens']:.0f}",
        "-" if margin is None else f"{margin:.3f}",
        format_estimate(summary["first_kl"], summary["first_kl_error"], 5),
    ]


def evaluate_agreement(
    llm: LLM,
    text: str,
    *,
    context_size: int = DEFAULT_CONTEXT,
    prompts: int = DEFAULT_PROMPTS,
    n_tokens: int = DEFAULT_TOKENS,
    on_progress: OnProgress | None = None,
) -> AgreementReport:
    """Compares greedy texts after prefills of consecutive windows of ``text``.

    Every window of ``context_size`` tokens is a prompt; ``n_tokens`` follow it, through ends of
    text too. ``on_progress("evaluate", done, total)`` counts prompts. Raises UsageError for a text
    that is too short and ResourceError when three sessions do not fit in memory.
    """
    if n_tokens < 1:
        raise UsageError(f"the number of tokens must be at least 1, got {n_tokens}")
    windows = cut_windows(llm, text, context_size, prompts)
    n_positions = context_size + n_tokens
    llm.profile_budgets(windows[0])
    sparse = llm.start_runner(n_positions, n_prompt=context_size)
    same_chunks = PrefillConfig(batch_size=sparse.batch_size, chunk_size=sparse.chunk_size)
    floor = llm.start_runner(n_positions, attention=DenseConfig(), prefill=same_chunks)
    dense = llm.start_runner(
        n_positions, attention=DenseConfig(), prefill=_other_chunks(sparse.chunk_size)
    )
    progress = Progress(on_progress, len(windows))
    found: list[list[PromptAgreement]] = [[], []]
    for window in windows:
        expected, logits = _continue_greedily(dense, window, n_tokens)
        for runner, results in zip((sparse, floor), found, strict=True):
            results.append(_compare(runner, window, expected, logits))
        progress.advance()
    return AgreementReport(
        model=llm.model_path.name,
        context=context_size,
        n_tokens=n_tokens,
        sparse=Agreement(
            attention=llm.report_attention(context_size),
            chunk_size=sparse.chunk_size,
            prompts=tuple(found[0]),
        ),
        floor=Agreement(
            attention=DenseConfig().to_dict(),
            chunk_size=floor.chunk_size,
            prompts=tuple(found[1]),
        ),
    )


def _other_chunks(chunk_size: int) -> PrefillConfig:
    """Dense in its preferred chunks, or in half of them if those are ``chunk_size``."""
    preferred = DenseConfig.preferred_chunk_size
    return PrefillConfig(chunk_size=preferred // 2 if preferred == chunk_size else preferred)


def _continue_greedily(
    runner: Runner, prompt: NDArray[np.int32], n_tokens: int
) -> tuple[list[int], NDArray[np.float32]]:
    """The most likely tokens after ``prompt``, and the logits [n_tokens, vocab_size] of each."""
    tokens: list[int] = []
    rows = np.empty((n_tokens, runner.vocab_size), dtype=np.float32)
    logits = prefill_prompt(runner, prompt)
    for row in rows:
        if tokens:
            logits = runner.decode(tokens[-1])
        row[:] = logits
        tokens.append(int(logits.argmax()))
    return tokens, rows


def _compare(
    runner: Runner,
    prompt: NDArray[np.int32],
    expected: list[int],
    expected_logits: NDArray[np.float32],
) -> PromptAgreement:
    """Decodes with ``runner`` as long as its most likely tokens are ``expected``."""
    logits = prefill_prompt(runner, prompt)
    first = np.array(expected[:1], dtype=np.int32)
    kl = float(compare_logits(expected_logits[:1], logits[None], first).kl[0])
    for index, token in enumerate(expected):
        if index:
            logits = runner.decode(expected[index - 1])
        other = int(logits.argmax())
        if other != token:
            row = expected_logits[index]
            return PromptAgreement(
                n_tokens=len(expected),
                n_equal=index,
                margin=float(row[token] - row[other]),
                first_kl=kl,
            )
    return PromptAgreement(n_tokens=len(expected), n_equal=len(expected), margin=None, first_kl=kl)

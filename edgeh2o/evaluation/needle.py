"""Passkey retrieval: a number is hidden in a long text and asked for at the end.

The prompt is read and the answer decoded with the attention under test, as ``edgeh2o run`` does;
the same prompts are read and answered densely for comparison.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..attention.base import describe_settings
from ..attention.dense import DenseConfig
from ..errors import UsageError
from ..option_fields import check_int
from .decoding import decode_block
from .filler import filler_tokens
from .progress import Progress
from .reading import prefill_prompt, score_answer, split_answer
from .reporting import markdown_table
from .windows import find_beginning

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM
    from ..runners.base import Runner

Place = Literal["start", "middle", "end"]
PLACES: tuple[Place, ...] = get_args(Place)

_INTRODUCTION = "There is a pass key hidden in the text below. Find it and remember it.\n\n"
_NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
_QUESTION = "\n\nWhat is the pass key?"
_ANSWER = "The pass key is"
# Where the text stands in a chat template that is rendered around it.
_MARK = "@@text@@"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleGrid:
    """Which prompts to make: every length x depth x place.

    ``lengths`` are tokens of whole prompts. ``depths``, from 0 (the beginning) to 1, choose the
    chunk that holds the needle, ``places`` where in that chunk it stands. The last ``generated``
    tokens before the question, and the question, are decoded one after another as if the model had
    written them; 0: all is read as the prompt. Raises UsageError for values out of range.
    """

    lengths: tuple[int, ...] = (2048, 4096)
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    places: tuple[Place, ...] = PLACES
    seed: int = 0
    generated: int = 0

    def __post_init__(self) -> None:
        if not (self.lengths and self.depths and self.places):
            raise UsageError("a needle grid needs at least one length, one depth and one place")
        if min(self.lengths) < 1:
            raise UsageError(f"lengths must be at least 1 token, got {min(self.lengths)}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UsageError(f"depths must lie between 0 and 1, got {depth}")
        unknown = [place for place in self.places if place not in PLACES]
        if unknown:
            raise UsageError(f"places are {', '.join(PLACES)}, got {unknown[0]!r}")
        check_int(self, "generated", 0)

    def cells(self) -> Iterator[tuple[int, float, Place]]:
        """Length, depth and place of every prompt."""
        return product(self.lengths, self.depths, self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleResult:
    """One prompt. ``position`` is that of the needle's first token.

    ``_exact`` tells whether greedy decoding gives the whole passkey, ``_logprob`` is the mean
    natural log-probability of the answer's tokens, each after the right ones before it.
    """

    length: int
    depth: float
    place: Place
    position: int
    passkey: str
    dense_exact: bool
    sparse_exact: bool
    dense_logprob: float
    sparse_logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleReport:
    """All prompts of a grid; ``attention`` is that of the longest."""

    model: str
    attention: dict[str, Any]
    chunk_size: int
    grid: NeedleGrid
    results: tuple[NeedleResult, ...]

    def select(self, *, length: int | None = None, depth: float | None = None) -> NeedleReport:
        """The report of the prompts with this length and this depth."""
        kept = tuple(
            result
            for result in self.results
            if length in (None, result.length) and depth in (None, result.depth)
        )
        return replace(self, results=kept)

    def summary(self) -> dict[str, Any]:
        """Shares of exact answers and mean log-probabilities of the answers' tokens.

        ``kept_fraction`` is the share of the prompts that dense attention solves which the
        attention under test solves too, None if it solves none.
        """
        results = self.results
        solved = [result.sparse_exact for result in results if result.dense_exact]
        return {
            "prompts": len(results),
            "dense_exact": float(np.mean([result.dense_exact for result in results])),
            "sparse_exact": float(np.mean([result.sparse_exact for result in results])),
            "kept_fraction": float(np.mean(solved)) if solved else None,
            "dense_logprob": float(np.mean([result.dense_logprob for result in results])),
            "sparse_logprob": float(np.mean([result.sparse_logprob for result in results])),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON: the summary and every prompt."""
        return {**asdict(self), "summary": self.summary()}

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record per prompt, fit for CSV."""
        return [asdict(result) for result in self.results]

    def format_text(self) -> str:
        """A heading, a row per length and depth and one for all; without a final newline."""
        header = ["length", "depth", "prompts", "dense right", "sparse right"]
        header += ["dense log-prob.", "sparse log-prob."]
        rows = [
            [f"{length:,}", f"{depth:g}", *_summary_cells(self.select(length=length, depth=depth))]
            for length, depth in product(self.grid.lengths, self.grid.depths)
        ]
        rows.append(["all", "", *_summary_cells(self)])
        attention = describe_settings(self.attention)
        heading = f"{self.model}: {attention}, chunks of {self.chunk_size:,}"
        if self.grid.generated:
            heading += f", asked {self.grid.generated:,} generated tokens after the prompt"
        return f"{heading}\n\n{markdown_table(header, rows)}"


def _summary_cells(report: NeedleReport) -> list[str]:
    summary = report.summary()
    return [
        str(summary["prompts"]),
        f"{100 * summary['dense_exact']:.0f} %",
        f"{100 * summary['sparse_exact']:.0f} %",
        f"{summary['dense_logprob']:.2f}",
        f"{summary['sparse_logprob']:.2f}",
    ]


def evaluate_needle(
    llm: LLM,
    grid: NeedleGrid,
    *,
    filler: str | None = None,
    chat: bool = False,
    on_progress: OnProgress | None = None,
) -> NeedleReport:
    """Asks for the passkey of every prompt of ``grid``, read densely and by ``llm``'s attention.

    ``filler`` is the text around the needle, by default one that edgeh2o makes; ``chat`` puts the
    prompt into the model's chat template. ``on_progress("evaluate", done, total)`` counts tokens.
    Raises UsageError when a length has no room for needle and question, or for a model without a
    chat template.
    """
    maker = _PromptMaker(llm, max(grid.lengths), filler=filler, chat=chat)
    prompts = [maker.make(*cell, grid.seed, grid.generated) for cell in grid.cells()]
    n_positions = max(len(prompt.tokens) + len(prompt.answer) for prompt in prompts)
    dense = llm.start_runner(n_positions, attention=DenseConfig())
    llm.profile_budgets(max((prompt.read for prompt in prompts), key=len))
    progress = Progress(on_progress, sum(len(prompt.tokens) for prompt in prompts))
    results: list[NeedleResult] = []
    cells = zip(grid.cells(), prompts, strict=True)
    for length, group in groupby(cells, key=lambda cell: cell[0][0]):
        # Of every length by the budgets that it has.
        sparse = llm.start_runner(n_positions, n_prompt=length)
        results += (_measure(cell, prompt, dense, sparse, progress) for cell, prompt in group)
        del sparse  # freed before the next one is allocated
    return NeedleReport(
        model=llm.model_path.name,
        attention=llm.report_attention(max(grid.lengths)),
        chunk_size=llm.chunk_size,
        grid=grid,
        results=tuple(results),
    )


def _measure(
    cell: tuple[int, float, Place],
    prompt: _Prompt,
    dense: Runner,
    sparse: Runner,
    progress: Progress,
) -> NeedleResult:
    length, depth, place = cell
    dense_exact, dense_logprob = _ask(dense, prompt)
    sparse_exact, sparse_logprob = _ask(sparse, prompt)
    progress.advance(len(prompt.tokens))
    return NeedleResult(
        length=length,
        depth=depth,
        place=place,
        position=prompt.position,
        passkey=prompt.passkey,
        dense_exact=dense_exact,
        sparse_exact=sparse_exact,
        dense_logprob=dense_logprob,
        sparse_logprob=sparse_logprob,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    tokens: NDArray[np.int32]
    n_read: int  # as the prompt; the others are decoded
    answer: Sequence[int]
    position: int
    passkey: str

    @property
    def read(self) -> NDArray[np.int32]:
        return self.tokens[: self.n_read]


class _PromptMaker:
    """Prompts of exact length over one filler."""

    def __init__(self, llm: LLM, longest: int, *, filler: str | None, chat: bool) -> None:
        self._llm = llm
        self._chunk_size = llm.chunk_size
        before, after = _chat_frame(llm) if chat else ("", f"{_QUESTION}\n")
        beginning = find_beginning(llm)
        self._before = self._tokenize(before + _INTRODUCTION)
        if beginning is not None:
            self._before = np.insert(self._before, 0, beginning)
        self._ending = after + _ANSWER
        self._filler = filler_tokens(llm, longest, filler)

    def make(
        self, length: int, depth: float, place: Place, seed: int, generated: int = 0
    ) -> _Prompt:
        """The prompt of ``length`` tokens with a passkey that belongs to this cell.

        ``generated`` tokens lie between what is read and the question.
        """
        rng = random.Random(f"{seed} {length} {depth} {place}")
        passkey = str(10000 + int(rng.random() * 90000))
        needle = self._tokenize(_NEEDLE.format(key=passkey))
        ending, answer = split_answer(self._llm, self._ending, f" {passkey}")
        first, end = len(self._before), length - len(ending)
        last = end - generated - len(needle)
        if last < first:
            others = f"the {generated} generated tokens, " if generated else ""
            raise UsageError(
                f"a prompt of {length} tokens has no room for {others}the needle and the question, "
                f"which take {first + generated + len(needle) + len(ending)}; use a larger length"
            )
        position = place_needle(
            depth, place, first=first, last=last, size=len(needle), chunk_size=self._chunk_size
        )
        n_before = position - first
        n_filler = end - first - len(needle)
        tokens = np.concatenate(
            [
                self._before,
                self._filler[:n_before],
                needle,
                self._filler[n_before:n_filler],
                ending,
            ]
        )
        n_read = end - generated if generated else length
        return _Prompt(tokens, n_read, answer, position, passkey)

    def _tokenize(self, text: str) -> NDArray[np.int32]:
        return np.array(self._llm.tokenize(text, add_special=False), dtype=np.int32)


def place_needle(
    depth: float, place: Place, *, first: int, last: int, size: int, chunk_size: int
) -> int:
    """Position of a needle of ``size`` tokens that may stand between ``first`` and ``last``.

    ``depth`` of that range names the chunk; the place inside the chunk is kept unless the chunk
    reaches beyond the range.
    """
    chunk = math.floor(first + depth * (last - first)) // chunk_size
    room = max(0, chunk_size - size)
    offset = {"start": 0, "middle": room // 2, "end": room}[place]
    return min(max(chunk * chunk_size + offset, first), last)


def _chat_frame(llm: LLM) -> tuple[str, str]:
    """What the model's chat template puts before a user's text, and after its question."""
    messages = [{"role": "user", "content": _MARK + _QUESTION}]
    before, found, after = llm.chat_template.render(messages).text.partition(_MARK)
    if not found:
        raise UsageError("the model's chat template does not show the user's text as it is")
    return before, after


def _ask(runner: Runner, prompt: _Prompt) -> tuple[bool, float]:
    """As ``score_answer``."""
    logits = prefill_prompt(runner, prompt.read)
    step = runner.max_decode_tokens
    for first in range(prompt.n_read, len(prompt.tokens), step):
        logits = decode_block(runner, prompt.tokens[first : first + step])[-1]
    return score_answer(runner, logits, prompt.answer)

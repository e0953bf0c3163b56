"""How well tasks that need a long context are solved after a sparse prefill, against a dense one.

A text is read once; its questions, one after another, go on from there. The answers are decoded
with full attention, as ``edgeh2o run`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..attention.dense import DenseConfig
from ..errors import UsageError
from .comparison import standard_error
from .progress import Progress
from .reading import prefill_prompt, score_answer, split_answer
from .reporting import format_estimate, markdown_table
from .seeded_report import SeededReport
from .tasks import DEFAULT_QUESTIONS, TASKS, LongTask, make_task
from .windows import DEFAULT_CONTEXT

if TYPE_CHECKING:
    from ..engine.session import OnProgress
    from ..llm import LLM
    from ..runners.base import Runner

DEFAULT_SEEDS = 2
# An answer to the letter, and the mean log-probability of its tokens.
Scores = list[tuple[bool, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskQuality:
    """The questions of all texts of one task.

    Percentages of those answered to the letter by greedy decoding; the difference is sparse less
    dense in points, with its standard error over texts (over questions where there is one text,
    NaN for a single one).
    ``_logprob`` are means over answers of the mean natural log-probability of their tokens;
    they tell differences that the right answers of a weak model are too few for.
    """

    task: str
    questions: int
    dense_percent: float
    sparse_percent: float
    difference: float
    difference_error: float
    dense_logprob: float
    sparse_logprob: float
    logprob_difference_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport(SeededReport):
    """``tasks`` in the order they were asked for; ``keys_per_query`` over all their texts."""

    text_name: ClassVar[str] = "text"

    tasks: tuple[TaskQuality, ...]

    def to_records(self) -> list[dict[str, Any]]:
        """One flat record per task, fit for CSV."""
        return self._records_of(self.tasks)

    def format_text(self) -> str:
        """A heading and a table for a terminal, without a final newline."""
        heading = self._heading("for each task")
        rows = [
            [
                task.task,
                task.questions,
                f"{task.dense_percent:.1f}",
                f"{task.sparse_percent:.1f}",
                format_estimate(task.difference, task.difference_error, digits=1, sign="+"),
                f"{task.dense_logprob:.2f}",
                format_estimate(
                    task.sparse_logprob - task.dense_logprob,
                    task.logprob_difference_error,
                    sign="+",
                ),
            ]
            for task in self.tasks
        ]
        header = ["task", "questions", "dense %", "sparse %", "difference"]
        header += ["dense log-prob.", "difference of log-prob."]
        return f"{heading}\n\n{markdown_table(header, rows)}"


def evaluate_tasks(
    llm: LLM,
    *,
    context_size: int = DEFAULT_CONTEXT,
    tasks: Sequence[str] = (),
    seeds: Sequence[int] = tuple(range(DEFAULT_SEEDS)),
    n_questions: int = DEFAULT_QUESTIONS,
    on_progress: OnProgress | None = None,
) -> TaskReport:
    """Asks the questions of ``make_task`` after a dense prefill and after that of ``llm``.

    Every task (all of ``TASKS`` if none is given) has a text for each seed, which with its longest
    question takes at most ``context_size`` tokens, and ``n_questions`` at most. A model of which
    nothing is known is profiled on the first text. ``on_progress("evaluate", done, total)`` counts
    texts. Raises UsageError for an unknown task, for texts that are too short and for a rule whose
    state cannot be noted, ResourceError when two sessions do not fit in memory.
    """
    if not seeds:
        raise UsageError("there must be at least one seed")
    if n_questions < 1:
        raise UsageError(f"there must be at least one question about a text, not {n_questions}")
    chosen = tuple(tasks) or tuple(TASKS)
    made = {
        name: [
            make_task(llm, name, context_size, seed=seed, n_questions=n_questions) for seed in seeds
        ]
        for name in chosen
    }
    llm.profile_budgets(np.array(made[chosen[0]][0].context, np.int32))
    sparse = llm.start_runner(context_size)
    dense = llm.start_runner(context_size, attention=DenseConfig())
    progress = Progress(on_progress, len(chosen) * len(seeds))
    n_pairs = n_tokens = 0
    results = []
    for name in chosen:
        scores = []
        for task in made[name]:
            dense_scores, _ = _answer(llm, dense, task)
            sparse_scores, pairs = _answer(llm, sparse, task)
            scores.append((dense_scores, sparse_scores))
            n_pairs += pairs
            n_tokens += len(task.context)
            progress.advance()
        results.append(_summarise(name, scores))
    return TaskReport(
        model=llm.model_path.name,
        attention=llm.report_attention(context_size),
        context=context_size,
        seeds=tuple(seeds),
        keys_per_query=n_pairs / n_tokens,
        tasks=tuple(results),
    )


def _answer(llm: LLM, runner: Runner, task: LongTask) -> tuple[Scores, int]:
    """The scores of the questions, and the pairs that reading the text computed."""
    n_tokens = len(task.context)
    prefill_prompt(runner, np.array(task.context, np.int32), stays_open=True)
    n_pairs = runner.pairs_computed
    if not runner.mark():
        raise UsageError(
            "the questions about a text need an attention whose state can be noted; a rule in "
            "Python cannot"
        )
    scores: Scores = []
    for question, text in task.questions:
        tokens, answer = split_answer(llm, question, text)
        logits = prefill_prompt(runner, tokens, n_read=n_tokens, stays_open=True)
        scores.append(score_answer(runner, logits, answer))
        runner.rewind(n_tokens)
    return scores, n_pairs


def _summarise(task: str, scores: Sequence[tuple[Scores, Scores]]) -> TaskQuality:
    # [side][questions][2]: right or not, log-probability
    dense, sparse = (np.concatenate([np.array(pair[i], float) for pair in scores]) for i in (0, 1))
    by_text = [np.mean(sparse, 0) - np.mean(dense, 0) for dense, sparse in scores]
    differences = np.array(by_text) if len(by_text) > 1 else sparse - dense
    dense_right, dense_logprob = map(float, dense.mean(axis=0))
    sparse_right, sparse_logprob = map(float, sparse.mean(axis=0))
    return TaskQuality(
        task=task,
        questions=len(dense),
        dense_percent=100 * dense_right,
        sparse_percent=100 * sparse_right,
        difference=100 * (sparse_right - dense_right),
        difference_error=100 * standard_error(differences[:, 0]),
        dense_logprob=dense_logprob,
        sparse_logprob=sparse_logprob,
        logprob_difference_error=standard_error(differences[:, 1]),
    )

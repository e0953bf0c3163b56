"""What a model without a budget table loses by default: the promise of ``--max-loss 0.5``.

    python -m bench.promise model.gguf --text-seeds 0,1 --onnx FOLDER -o md

The packaged table is left out and the cache folder is a fresh one. Windows of every kind of text of
``edgeh2o evaluate`` are read as the first long prompt of the model, which it learns from while it
is read; as the second, after a first one of prose; and, with ``--onnx``, by its export (of
``edgeh2o export-onnx``). The last quarter of the predictions is compared with a dense run's. These
windows are read sparse whether that pays or not; "by default" is how the first and the second one
are read where sparse would not be faster: densely, in 8 bits once the first has shown that this
changes little. The row "chat" is a document and ten questions about it, turn by turn, in a fresh
cache folder too: the predictions of the answers count.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from edgeh2o import LLM, DenseConfig, HeadwiseConfig, SamplingParams
from edgeh2o.attention.head_budgets import NO_TABLE
from edgeh2o.attention.kept_profiles import PROFILE_TOKENS, merge_profiles
from edgeh2o.cli.evaluation_options import list_of
from edgeh2o.config import RuntimeConfig
from edgeh2o.engine.memory_fit import start_runner
from edgeh2o.engine.payoff import choose_reading
from edgeh2o.engine.plan import RunPlan
from edgeh2o.engine.profile import PromptProfiler
from edgeh2o.engine.prompt_cache import PromptCache
from edgeh2o.evaluation.comparison import WindowComparer, estimate_loss
from edgeh2o.evaluation.long_texts import KINDS, Window, make_window
from edgeh2o.evaluation.reading import score_answer, split_answer
from edgeh2o.evaluation.reporting import format_estimate, markdown_table
from edgeh2o.evaluation.tasks import make_task
from edgeh2o.runners.runner_calls import attention_error

from .reporting import print_progress, run_script, write_report
from .windows import add_window_options

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgeh2o.runners.base import Runner

UNKNOWN_MODEL = HeadwiseConfig(budget_table=NO_TABLE)
FIRST, SECOND = "first prompt", "second prompt"
PROMPTS = (FIRST, SECOND, f"{FIRST} by default", f"{SECOND} by default", "ONNX export", "chat")
CHAT_DOCUMENT, CHAT_ROOM = 6000, 1024  # tokens: of the document, of what is said about it
NO_ANSWER = SamplingParams(max_tokens=0)


@dataclass(frozen=True, slots=True)
class Loss:
    """One window: loss in percent with its standard error over tokens, and what the guard did.

    ``kl`` is in nats; None for a chat, of which only the probability of the answers is known.
    """

    prompt: str
    kind: str
    seed: int
    loss_percent: float
    loss_percent_error: float
    kl: float | None
    attention_error_percent: float
    dense_reads: int

    @classmethod
    def of(
        cls, prompt: str, kind: str, seed: int, differences: NDArray[np.float64], **rest: Any
    ) -> Loss:
        """From the differences of the negative log-probabilities, sparse less dense."""
        return cls(prompt, kind, seed, *estimate_loss(differences), **rest)


class FirstPrompt:
    """A runner of windows that are the first prompt of a model each: what ``Session`` does.

    Sparse, or, ``by_default``, densely where that is as fast. Rows of its first call cannot be
    looked at any more.
    """

    def __init__(self, llm: LLM, context: int, *, by_default: bool) -> None:
        plan = RunPlan.of(
            llm.config, UNKNOWN_MODEL, llm.prefill, RuntimeConfig(threads=llm.threads)
        )
        self._llm, self._by_default = llm, by_default
        self._cache = PromptCache(plan)
        self._cache.take_weights(llm.model)
        chosen = plan.learning(context)
        if by_default:
            chosen, _ = self._cache.plan_prompt(context, 0, goes_on=False, stays_open=False)
        self._known, self._plan, self._context = plan, chosen, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache.runner, name)

    def reset(self) -> None:
        """Nothing is known of the model."""
        self._cache.plan, self._cache.running = self._known, self._plan
        self._cache.runner = None  # it may have gone on in other products
        self._cache.runner = start_runner(self._plan, self._llm.model, self._context, all_rows=True)

    def prefill(self, tokens: Window, *, is_last: bool) -> NDArray[np.float32] | None:
        runner, cache = cast("Any", self._cache.runner), self._cache
        profiler = PromptProfiler(self._llm.model, threads=self._llm.threads)
        first, rest = np.split(tokens, [PROFILE_TOKENS])
        runner.prefill(first, is_last=False, on_attention=profiler)
        table = profiler.table(len(tokens))
        assert table is not None, "the model's numbers are not finite"
        cache.learn(merge_profiles(None, table))
        if self._by_default and cache.is_learning:
            cache.end_learning(len(tokens), has_learnt=True)
        elif not self._by_default:
            learnt = cast("HeadwiseConfig", cache.plan.for_length(len(tokens)).attention)
            runner.policy.set_budgets(learnt.budgets)
        return cast("Any", runner.prefill(rest, is_last=is_last))

    def row_logits(self, first: int, n_rows: int) -> NDArray[np.float32]:
        return cast("Any", self._cache.runner).row_logits(first - PROFILE_TOKENS, n_rows)


@contextmanager
def fresh_cache() -> Iterator[None]:
    """A cache folder in which nothing is known of any model."""
    before = os.environ.get("EDGEH2O_CACHE")
    with TemporaryDirectory() as folder:
        os.environ["EDGEH2O_CACHE"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["EDGEH2O_CACHE"]
            else:
                os.environ["EDGEH2O_CACHE"] = before


def measure_windows(model: Path, args: argparse.Namespace) -> Iterator[Loss]:
    """The first and the second prompt, and the export's, on every window."""
    with fresh_cache(), LLM(model, threads=args.threads, attention=UNKNOWN_MODEL) as llm:
        # The texts that are scored are others: seeds count from 0.
        llm.profile_budgets(make_window(llm, "prose", args.ctx, seed=17))
        runners: dict[str, Any] = {
            FIRST: FirstPrompt(llm, args.ctx, by_default=False),
            SECOND: llm.start_runner(args.ctx, all_rows=True),
        }
        chosen = choose_reading(llm._session.plan, llm.model, args.ctx)
        if chosen.attention.reads_all:  # else it is what they are read by anyhow
            first = FirstPrompt(llm, args.ctx, by_default=True)
            second = start_runner(chosen, llm.model, args.ctx, all_rows=True)
            runners |= {f"{FIRST} by default": first, f"{SECOND} by default": second}
        yield from compare(llm, runners, args)
        if args.onnx is not None:
            with LLM(args.onnx, threads=args.threads, attention=UNKNOWN_MODEL) as exported:
                runner = exported.start_runner(args.ctx, all_rows=True)
                yield from compare(exported, {"ONNX export": runner}, args)


def compare(llm: LLM, runners: dict[str, Runner], args: argparse.Namespace) -> Iterator[Loss]:
    """Every runner on every window, against a dense run of the same model."""
    dense = llm.start_runner(args.ctx, attention=DenseConfig(), all_rows=True)
    comparer = WindowComparer(dense)
    for seed in args.text_seeds:
        for kind in args.kinds or KINDS:
            window = make_window(llm, kind, args.ctx, seed=seed)
            for prompt, runner in runners.items():
                scores = comparer.compare(runner, window, first=args.ctx - 1 - args.ctx // 4)
                yield Loss.of(
                    prompt,
                    kind,
                    seed,
                    scores.sparse_nll - scores.dense_nll,
                    kl=float(scores.kl.mean()),
                    attention_error_percent=100 * (attention_error(runner.error_sums) or 0.0),
                    dense_reads=runner.n_dense_reads,
                )


def measure_chat(model: Path, args: argparse.Namespace, seed: int) -> Loss:
    """Ten turns over a document, sparse and dense, with the same answers."""
    sides = []
    # The answers that are scored are no part of what a session makes room for.
    sizes = {"threads": args.threads, "context_size": args.document + CHAT_ROOM}
    for attention in (UNKNOWN_MODEL, DenseConfig()):
        with fresh_cache(), LLM(model, attention=attention, **sizes) as llm:
            task = make_task(llm, "dialogue", args.document, seed=seed)
            tokens, logprobs, lengths = list(task.context), [], []
            errors, n_dense = [], 0
            for question, number in task.questions:
                asked, _, said = question.partition("Assistant:")
                prompt, answer = split_answer(llm, f"{asked}Assistant:", f"{said}{number}.\n\n")
                tokens += prompt.tolist()
                stats = llm.generate(np.array(tokens, np.int32), NO_ANSWER, keep_cache=True).stats
                runner = llm._session.runner
                assert runner is not None and runner.prompt_logits is not None
                logprobs.append(score_answer(runner, runner.prompt_logits, answer)[1])
                lengths.append(len(answer))
                tokens += answer
                errors += [] if stats.attention_error is None else [stats.attention_error]
                n_dense += stats.heads_read_densely
            sides.append(np.array(logprobs))
            if attention is UNKNOWN_MODEL:
                largest, n_read = max(errors, default=0.0), n_dense
    # The mean of an answer's tokens counts as often as it has tokens.
    weights = np.array(lengths) / np.mean(lengths)
    return Loss.of(
        "chat",
        "dialogue",
        seed,
        weights * (sides[1] - sides[0]),
        kl=None,
        attention_error_percent=100 * largest,
        dense_reads=n_read,
    )


def make_table(losses: list[Loss]) -> str:
    """A row per kind of text and prompt: means over the seeds."""
    header = ["text", "prompt", "windows", "loss %", "KL", "error of the attention %"]
    groups: dict[tuple[str, str], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.kind, loss.prompt), []).append(loss)
    rows = []
    for (kind, prompt), group in sorted(groups.items(), key=lambda g: PROMPTS.index(g[0][1])):
        error = np.sqrt(np.mean([loss.loss_percent_error**2 for loss in group]) / len(group))
        kls = [loss.kl for loss in group if loss.kl is not None]
        rows.append(
            [
                kind,
                prompt,
                len(group),
                format_estimate(np.mean([loss.loss_percent for loss in group]), error, sign="+"),
                f"{np.mean(kls):.4f}" if kls else "-",
                f"{np.mean([loss.attention_error_percent for loss in group]):.1f}",
                sum(loss.dense_reads for loss in group),
            ]
        )
    return markdown_table([*header, "heads read densely"], rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_window_options(parser, ctx=4096, seeds=(0, 1))
    parser.add_argument("--onnx", type=Path, metavar="FOLDER", help="export of the same model")
    parser.add_argument("--chats", type=list_of(int), default=(0,), help="seeds of the chats")
    parser.add_argument("--document", type=int, default=CHAT_DOCUMENT, help="tokens of a chat's")
    args = parser.parse_args()
    if args.ctx < 2 * PROFILE_TOKENS:
        parser.error(f"--ctx must be at least {2 * PROFILE_TOKENS}, got {args.ctx}")
    return args


def main() -> int:
    """Measures everything, prints one table; returns the exit code."""
    args = parse_arguments()
    losses = []
    for loss in measure_windows(args.model, args):
        print_progress(str(loss))
        losses.append(loss)
    losses += [measure_chat(args.model, args, seed) for seed in args.chats]
    write_report(args.output, [make_table(losses)], [asdict(loss) for loss in losses])
    return 0


if __name__ == "__main__":
    run_script(main)

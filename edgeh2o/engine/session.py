"""A conversation with one model: its runner, what the cache holds, and the prompt in progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..attention.kept_profiles import keep_profile, merge_profiles
from ..config import EVICT_WHEN_FULL, SamplingParams
from ..errors import FormatError, ResourceError, UsageError
from ..runners.base import Runner, RunnerState, n_evicted
from .access import ExclusiveAccess, GenerationStream
from .generate import Generation
from .learning import Learner, describe_knowledge, may_learn, measure_profile
from .payoff import choose_reading
from .request_checks import check_request
from .transcript import Transcript, count_common

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..attention.budget_table import BudgetTable
    from .draft_model import DraftModel
    from .grammar import GrammarState
    from .logits import LogitsProcessor
    from .models import LoadedModel
    from .plan import RunPlan
    from .prompt import Prompt, PromptReader
    from .results import GenerationResult

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a prompt of ``n_prompt`` tokens begins: behind ``n_kept`` of the cache, or anew.

    It is read by ``plan``, with room for ``context`` tokens.
    """

    plan: RunPlan
    context: int
    n_prompt: int
    n_kept: int = 0


class Session:
    """Prompts go on from what the cache holds, and files keep it.

    A runner is reallocated only when a prompt needs more context.
    """

    def __init__(
        self,
        prompts: PromptReader,
        plan: RunPlan,
        *,
        path: Path,
        seed: int | None,
        on_progress: OnProgress | None,
    ) -> None:
        self._prompts: PromptReader | None = prompts
        self.plan = plan  # of prompts that begin anew
        self._running = plan  # of what the cache holds
        self._profile: BudgetTable | None = None  # what prompts of this process have made
        self.path = path
        self._model: LoadedModel | None = None
        self._draft: DraftModel | None = None
        self.load_s = 0.0
        self.access = ExclusiveAccess()
        self.runner: Runner | None = None  # None before the first prompt
        self._is_open = False  # what it holds may be gone on from
        self._seed = seed
        self._on_progress = on_progress
        self._transcript: Transcript | None = None
        self._generation: Generation | None = None

    def check_prompt(self, opening: Callable[[], Prompt], sampling: SamplingParams) -> None:
        """Raises what ``stream`` would for a prompt that is read whole; needs no weights."""
        goes_on = sampling.context_full == EVICT_WHEN_FULL
        self.plan.choose_context(len(opening().encode()), sampling.max_tokens, goes_on=goes_on)

    def check_options(self, sampling: SamplingParams) -> None:
        """Raises what ``stream`` would for any prompt with these options. Needs the weights."""
        goes_on = sampling.context_full == EVICT_WHEN_FULL
        context = self.plan.choose_context(1, sampling.max_tokens)
        plan = self._plan_anew(1, context, goes_on=goes_on, stays_open=True)
        check_request(plan, context, sampling, self.model, has_draft=bool(self._draft))

    def stream(
        self, opening: Callable[[], Prompt], sampling: SamplingParams | None, **options: Any
    ) -> GenerationStream:
        """Chunks of the answer to a prompt; options as those of ``_begin``.

        Raises BusyError where another thread reads a stream.
        """
        with self.access.call():
            generation = self._begin(opening, sampling, **options)
            return GenerationStream(generation, self.access, self._require_current)

    def generate(
        self, opening: Callable[[], Prompt], sampling: SamplingParams | None, **options: Any
    ) -> GenerationResult:
        """The whole answer to a prompt; see ``stream``."""
        with self.access.call():
            generation = self._begin(opening, sampling, **options)
            for _ in generation:
                self._require_current(generation)
            return generation.result()

    def _begin(
        self,
        opening: Callable[[], Prompt],
        sampling: SamplingParams | None,
        *,
        logprobs: bool = False,
        keep_cache: bool = False,
        processor: LogitsProcessor | None = None,
        grammar: GrammarState | None = None,
    ) -> Generation:
        """Makes room for a prompt and its answer, and ends the prompt before.

        With ``keep_cache`` the cache serves as far as it agrees with the prompt, and stays fit for
        a prompt that goes on from this one. Raises UsageError for a prompt without tokens or longer
        than the context may be, ResourceError with the numbers when that does not fit in memory.
        """
        started_at = time.perf_counter()
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise UsageError(f"sampling must be SamplingParams(...), got {sampling!r:.80}")
        sampling = sampling if sampling.seed is not None else replace(sampling, seed=self._seed)
        prompt = opening()
        token_ids = prompt.encode(self.transcript if keep_cache else None)
        start = self._choose_start(token_ids.tolist(), sampling, keep_cache=keep_cache)
        # What is there stays as it is until nothing can be refused any more.
        check_request(start.plan, start.context, sampling, self.model, has_draft=bool(self._draft))
        if sampling.schema is not None:
            from .grammar import constrain

            grammar = constrain(sampling.schema, self.model.tokenizer, self.plan.config.vocab_size)
        runner, n_cached = self._begin_at(start, sampling)
        batch_size = self._running.open_batch_size if keep_cache else runner.batch_size
        is_whole = not n_cached and len(token_ids) <= runner.max_context
        length = runner.max_context if keep_cache else len(token_ids)
        learner = self._start_learner(len(token_ids), length) if is_whole else None
        draft = self._draft and self._draft.prepared(sampling, runner.max_context)
        if n_cached:
            runner.rewind(n_cached)
        self._is_open = keep_cache
        text = prompt.transcript
        self._transcript = text and text.with_prompt_ids(token_ids.tolist())
        self._generation = Generation(
            runner,
            self.model.tokenizer,
            token_ids,
            sampling,
            logprobs=logprobs,
            n_cached=n_cached,
            stays_open=keep_cache,
            batch_size=batch_size,
            on_prefill=self._on_progress and partial(self._on_progress, "prefill"),
            learner=learner,
            draft=draft,
            processor=processor,
            grammar=grammar,
            started_at=started_at,
            run={
                **self._running.report(),
                "model": str(self.path),
                "load_s": self.load_s,
                "context_size": runner.max_context,
                "note": describe_knowledge(
                    self._running, self.model, len(token_ids), learns=learner is not None
                ),
            },
        )
        sizes = {"weights": self.model.weight_bytes, **runner.memory_bytes}
        self._generation.describe_run(memory_bytes=sizes | (draft.memory_bytes if draft else {}))
        return self._generation

    def _require_current(self, generation: Generation) -> None:
        """Lets ``generation`` go on, if the runner is still its own."""
        if generation is not self._generation:
            raise UsageError(
                "this stream was ended by a newer prompt, a session file or close(); "
                "read a stream to its end first, or load a second LLM"
            )

    def _start_learner(self, n_prompt_tokens: int, length: int) -> Learner | None:
        """What looks on while a prompt is read from its beginning, if it is to be profiled.

        ``length`` is what the prompt may grow to.
        """
        if not may_learn(self._running, self.model, n_prompt_tokens):
            return None
        return Learner(
            self.model,
            self._running,
            n_prompt_tokens,
            partial(self._learn_while_reading, length),
            known=self._profile,
        )

    def _learn(self, table: BudgetTable) -> None:
        """Prompts that begin anew go by the profile."""
        self._profile = table
        self.plan = self.plan.varied(self.plan.settings.with_profile(table))

    def _learn_while_reading(self, length: int, table: BudgetTable | None) -> None:
        """And so does the rest of one that is learning, dense if there is no profile or gain."""
        if table is not None:
            self._learn(table)
        runner, generation, running = self.runner, self._generation, self._running
        if not running.attention.is_learning or runner is None or generation is None:
            return
        if table is None:
            self._running = running.reading_all_on()
        else:
            chosen = choose_reading(self.plan, self.model, length)
            reads_all = chosen.attention.reads_all
            self._running = self.plan.reading_all_on(saves_time=True) if reads_all else chosen
        chosen = cast("Any", self._running.attention)
        cast("Any", runner).policy.set_budgets(chosen.budgets, chosen.decode_budgets or ())
        if table is not None:
            note = f"the first {runner.position:,} tokens read dense and profiled"
            generation.describe_run(**self._running.report(), note=note)

    def profile(self, token_ids: NDArray[np.int32], *, is_kept: bool = False) -> bool:
        """Makes a profile of ``token_ids`` [n], if the model lacks one and n suffices.

        Whether it did. Prompts that are answered do so while they are read. Only one that
        ``is_kept`` is known to other processes. Raises ResourceError if it does not fit in memory.
        """
        with self.access.call():
            table = measure_profile(self.plan, self.model, token_ids)
            if table is not None:
                self._learn(keep_profile(table) if is_kept else merge_profiles(None, table))
            return table is not None

    @property
    def prompts(self) -> PromptReader:
        """What makes prompts of texts. Raises UsageError once the model is closed."""
        if self._prompts is None:
            raise UsageError("the model is closed; load it again")
        return self._prompts

    @property
    def model(self) -> LoadedModel:
        """The weights. Raises UsageError once they are freed, and while they are being loaded."""
        if self._model is None:
            raise UsageError("the model is closed, or not loaded yet; load it again")
        return self._model

    def take_weights(
        self, model: LoadedModel, load_s: float, draft: DraftModel | None = None
    ) -> None:
        """Makes the session fit to answer; ``load_s`` seconds were needed for it."""
        self._model = self.prompts.model = model
        self._draft, self.load_s = draft, load_s

    def close(self) -> None:
        """Frees the weights and the cache; the prompt in progress ends with an error."""
        self._prompts = self._model = self._draft = self.runner = None
        self._generation = self._transcript = None

    def prepare(
        self,
        n_prompt: int,
        max_tokens: int,
        plan: RunPlan | None = None,
        goes_on: bool = False,
        stays_open: bool = False,
    ) -> Runner:
        """A runner at position 0 with room for the prompt. Raises as ``_begin`` does.

        ``plan`` is that of a saved session; else the first prompt from which the model is learnt
        begins dense, budgets are those of its length, and one that sparse prefill would not read
        faster is read dense: for one that ``stays_open`` when the context is full. A prompt that
        ``goes_on`` past the context needs no room for all of it.
        """
        needed = self.plan.choose_context(n_prompt, max_tokens, goes_on=goes_on)
        if plan is None:
            plan = self._plan_anew(n_prompt, needed, goes_on=goes_on, stays_open=stays_open)
        else:
            plan = plan.rounding_for(needed)
        return self._start_anew(plan, needed)

    def _plan_anew(
        self, n_prompt: int, context: int, *, goes_on: bool, stays_open: bool
    ) -> RunPlan:
        """By what a prompt is read that begins anew; see ``prepare``."""
        length = context if stays_open else min(n_prompt, context)
        plan = choose_reading(self.plan, self.model, length)
        learns = n_prompt <= context and may_learn(plan, self.model, n_prompt)
        if learns and plan.attention.profiled_prompts == 0:
            plan = plan.learning(context)
        return plan.evicting() if goes_on else plan

    def _start_anew(self, plan: RunPlan, context: int) -> Runner:
        """A runner at position 0; what the one before held is gone, and its stream ends."""
        self._generation = self._transcript = None
        if self.runner is not None and plan == self._running and self._holds(context):
            self.runner.reset()
        else:
            self.runner = None  # freed before the next one is allocated
            self._running = plan
            self.runner = plan.start_runner(self.model, context)
        return self.runner

    def _holds(self, context: int) -> bool:
        """Whether the runner has room for so many positions, and counts them alike."""
        length = 0 if self.runner is None else self.runner.max_context
        return length >= context and self.plan.rotates_alike(length, context)

    def _choose_start(
        self, prompt: Sequence[int], sampling: SamplingParams, *, keep_cache: bool
    ) -> Start:
        """Where a prompt begins; nothing changes yet. Raises UsageError for one that is too long.

        The cache is kept as far as it agrees with the prompt. What a sparse prefill has read cannot
        be taken back singly: a prompt that departs from it earlier goes on from the last mark
        before. What an eviction has left serves prompts that go on past the context too.
        """
        goes_on, n_prompt = sampling.context_full == EVICT_WHEN_FULL, len(prompt)
        if keep_cache:
            needed = self._running.choose_context(n_prompt, sampling.max_tokens, goes_on=goes_on)
            n_kept = self._count_kept(prompt, needed, goes_on=goes_on)
            if n_kept:
                held = self.runner.max_context if self.runner else 0
                return Start(self._running, max(held, needed), n_prompt, n_kept)
        needed = self.plan.choose_context(n_prompt, sampling.max_tokens, goes_on=goes_on)
        plan = self._plan_anew(n_prompt, needed, goes_on=goes_on, stays_open=keep_cache)
        return Start(plan, needed, n_prompt)

    def _count_kept(self, prompt: Sequence[int], needed: int, *, goes_on: bool) -> int:
        """Tokens of the cache, in whose place as many of ``prompt`` need not be read."""
        runner = self.runner
        if runner is None or not self._is_open or not self._may_serve(runner, goes_on):
            return 0
        n_kept = count_common(runner.token_ids, prompt)
        if n_kept == len(prompt) and (runner.prompt_logits is None or n_kept != runner.prefill_end):
            n_kept -= 1  # the logits after the last token are needed
        n_kept = runner.find_mark(n_kept)
        if not n_kept or not self.may_go_on(n_kept, len(prompt), needed):
            return 0
        is_short = runner.max_context < needed and 2 * n_kept < len(prompt)
        return 0 if is_short and self._may_turn_sparse(needed) else n_kept

    def _begin_at(self, start: Start, sampling: SamplingParams) -> tuple[Runner, int]:
        """A runner for the prompt and how much it holds of it, to which it is yet to be rewound.

        The cache grows with its contents where it is too short. Raises ResourceError.
        """
        if not start.n_kept:
            return self._start_anew(start.plan, start.context), 0
        runner = self.runner
        if runner is not None and runner.max_context < start.context:
            runner = self._grow(runner, start.n_kept, start.context)
        if runner is None:  # what its rule has seen cannot be moved
            goes_on = sampling.context_full == EVICT_WHEN_FULL
            runner = self.prepare(
                start.n_prompt, sampling.max_tokens, goes_on=goes_on, stays_open=True
            )
            return runner, 0
        self._transcript, self._generation = self.transcript, None
        return runner, start.n_kept

    def _may_serve(self, runner: Runner, goes_on: bool) -> bool:
        """Whether a prompt that ``goes_on`` past the context, or not, may begin with the cache."""
        if goes_on:
            return self._running.evicting() == self._running
        return not n_evicted(runner)

    def may_go_on(self, n_kept: int, n_prompt: int, context: int) -> bool:
        """Whether a prompt may begin with so many tokens of the cache, and go on by its plan.

        In a context so long, for which the cache may have to grow.
        """
        length = context if self.runner is None else self.runner.max_context
        return self.plan.rotates_alike(length, context) and self.plan.may_go_on_by(
            self._running, n_kept, n_prompt, context
        )

    def _may_turn_sparse(self, context: int) -> bool:
        """Whether the cache was read dense for being short, and ``context`` no longer is."""
        is_dense = choose_reading(self.plan, self.model, context).attention.reads_all
        return self._running.attention.reads_all and not is_dense

    def _grow(self, old: Runner, n_kept: int, needed: int) -> Runner | None:
        """Moves so many tokens to a longer context; None if the attention's rule cannot be."""
        trained = self._running.config.context_length
        # Twice as long, lest a chat moves at every turn.
        context = max(needed, min(trained, 2 * old.max_context))
        if not self._running.rotates_alike(context, needed):
            context = needed
        runner = self._running.start_runner(self.model, context)
        old.rewind(n_kept)
        self.runner = runner if RunnerState.copy(old, runner) else None
        return self.runner

    def begin_as(self, other: Session, n_tokens: int, context: int) -> None:
        """Takes up the first ``n_tokens`` of another session of the model, up to one of its marks.

        With room for ``context`` tokens. The other stays as it is, and may be at work. Raises
        ResourceError for what does not fit in memory, ValueError for runners without ``copy_from``.
        """
        with self.access.call():
            source, self.runner = other.runner, None
            runner = other._running.start_runner(self.model, context)
            copy = getattr(runner, "copy_from", None)
            if copy is None or source is None:
                raise ValueError("these runners cannot be copied")
            copy(source, n_tokens)
            self.plan, self._profile = other.plan, other._profile
            self._running, self.runner = other._running, runner
            self._generation, self._transcript = None, other._transcript
            self._is_open = True

    def forget(self) -> None:
        """Leaves nothing to go on from, and no word of it to save."""
        with self.access.call():
            self._generation = self._transcript = None
            if self.runner is not None:
                self.runner.reset()

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """That of a session file which is made now."""
        return self._running.fingerprint(self.model)

    @property
    def has_open_prompt(self) -> bool:
        """Whether there is something to go on from: a prompt, or its beginning up to a mark."""
        runner = self.runner
        return self._is_open and runner is not None and runner.find_mark(runner.position) > 0

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Writes a session file; one without a cache if there is only ``extra`` to go on from.

        Or of whose cache something was evicted. Raises UsageError if there is nothing at all, and
        for an ``extra`` that JSON cannot hold, ResourceError for a cache alone with an eviction.
        """
        from .session_file import write_session

        try:
            json.dumps(dict(extra))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"what is saved with a session (extra) must be plain values by name: {error}"
            ) from None
        with self.access.call():
            transcript, runner = self.transcript, self.runner
            if runner is None or not self.has_open_prompt or (extra and n_evicted(runner)):
                if not extra:
                    raise UsageError(
                        "there is no prompt to save: one must have been read with keep_cache"
                    )
                self._generation = None  # whose cache goes
                runner, transcript = self.prepare(0, 0), None
            if n := n_evicted(runner):
                raise ResourceError(
                    f"the session cannot be saved: {n} of its tokens were evicted, as "
                    "--context-full evict has it; use --context-full shift, or a larger context "
                    "(-c) that holds them all"
                )
            runner.rewind(runner.find_mark(runner.position))  # it may be broken
            if self._generation is not None and self._generation.speculation is not None:
                self._generation.speculation.forget_drafts()
            document = {"transcript": transcript and transcript.to_dict(), "extra": dict(extra)}
            write_session(
                path,
                fingerprint=self.fingerprint,
                is_taught=self._running.attention.is_taught,
                state=RunnerState.of(runner),
                rows=runner.cached_rows(),
                document=document,
                context=runner.max_context,
            )

    def load(self, path: Path) -> dict[str, Any]:
        """Takes up a session file; returns its ``extra``."""
        from .session_file import open_session

        with self.access.call(), ExitStack() as stack:
            plan, vocab_size = self._plan_of_file(path), self.plan.config.vocab_size
            fingerprint = plan.fingerprint(self.model)
            saved = stack.enter_context(
                open_session(path, fingerprint=fingerprint, vocab_size=vocab_size)
            )
            values, extra = saved.document.get("transcript"), saved.document.get("extra")
            if not isinstance(extra, dict) or not isinstance(values, (dict, type(None))):
                raise FormatError(f"the session file {path} lacks its document; delete it")
            transcript = (
                None if values is None else Transcript.from_dict(values, vocab_size=vocab_size)
            )
            n_tokens = len(saved.state.token_ids)
            room = self._find_room(path, n_tokens, saved.context)
            runner = self.prepare(n_tokens, room, plan)
            saved.restore(runner)
            self._generation, self._transcript, self._is_open = None, transcript, True
        return extra

    def _find_room(self, path: Path, n_tokens: int, made_for: int) -> int:
        """Tokens that a file needs room for behind its own, -1 for those of an open answer.

        Such that its context rotates keys as that in which it was made. Raises UsageError.
        """
        context = self.plan.choose_context(n_tokens, -1, goes_on=True)
        if n_tokens > context:
            raise UsageError(
                f"the session file {path} holds {n_tokens} tokens and the context {context}; "
                f"use -c {n_tokens + 1} or more, or name another file with --session"
            )
        for room in (-1, max(0, made_for - n_tokens)):
            held = self.plan.choose_context(n_tokens, room)
            if n_tokens == 0 or self.plan.rotates_alike(held, made_for):
                return room
        raise UsageError(
            f"the session file {path} was made in a context of {made_for} positions and this one "
            f"has {context}, for which the model rotates its keys otherwise (LongRoPE); use "
            f"-c {made_for}, or name another file with --session"
        )

    @property
    def transcript(self) -> Transcript | None:
        """What the cache holds as text, with as much of its answer as there is."""
        generation = self._generation
        if self._transcript is None or generation is None:
            return self._transcript
        return self._transcript.with_answer(
            generation.text,
            generation.token_ids[: generation.n_said],
            self.prompts.model.tokenizer,
        )

    def check_file(self, path: Path) -> None:
        """Raises UsageError if a session file is of another model or plan; needs no weights."""
        from .session_file import check_session_file

        plan = self._plan_of_file(path)
        check_session_file(path, plan.fingerprint(self.prompts.model))

    def _plan_of_file(self, path: Path) -> RunPlan:
        """How a saved session goes on: with the budgets that were looked up when it was made."""
        from .session_file import read_settings

        return self.plan.holding(read_settings(path))

"""A conversation with one model: its runner, what the cache holds, and the prompt in progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .._core import release_threads
from ..attention.kept_profiles import keep_profile, merge_profiles
from ..errors import UsageError
from ..lora_config import make_scales
from ..option_fields import require_flag
from ..runners.base import Runner, RunnerState
from ..runners.runner_calls import n_evicted, plan_calls
from ..sampling_config import EVICT_WHEN_FULL, SamplingParams
from .access import ExclusiveAccess, GenerationStream
from .context_size import choose_context
from .embedding import (
    choose_pooling,
    count_read,
    embed_prompt,
    longest_first,
    project,
    reporting,
    require_rows,
)
from .full_context import require_whole
from .generate import Generation
from .learning import Learner, describe_knowledge, describe_newer, may_learn, measure_profile
from .models import weight_sizes
from .open_prompt import OpenPrompt
from .payoff import describe_decode
from .prompt_cache import PromptCache, Start
from .request_checks import check_request, require_sampling
from .saved_plan import fingerprint_of, plan_as_saved
from .transcript import make_document, read_document

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..attention.budget_table import BudgetTable
    from ..lora_config import LoraAdapter
    from .draft_sources import DraftProvider
    from .embedding import EmbeddingModel
    from .grammar import GrammarState
    from .logits import DrawnProbabilities, LogitsProcessor
    from .models import LoadedModel
    from .plan import RunPlan
    from .prompt import Prompt, PromptReader
    from .results import GenerationResult
    from .transcript import Transcript

OnProgress = Callable[[str, int, int], None]


class Session:
    """Prompts go on from what the cache holds, and files keep it."""

    def __init__(
        self,
        prompts: PromptReader,
        plan: RunPlan,
        *,
        path: Path,
        seed: int | None,
        on_progress: OnProgress | None,
        adapters: Sequence[LoraAdapter] = (),
    ) -> None:
        """``adapters`` are those that the plan has scales of, of prompts that say nothing."""
        self.adapters, self._scales = adapters, plan.adapter_scales
        self._prompts: PromptReader | None = prompts
        self.cache = PromptCache(plan)
        self.path = path
        self._draft: DraftProvider | None = None
        self.load_s = 0.0
        self.access = ExclusiveAccess()
        self._seed = seed
        self._on_progress = on_progress
        self._current = OpenPrompt()

    def check_prompt(self, opening: Callable[[], Prompt], sampling: SamplingParams) -> None:
        """Raises what ``stream`` would for a prompt that is read whole; needs no weights."""
        goes_on = sampling.context_full == EVICT_WHEN_FULL
        n_prompt = len(opening().encode())
        choose_context(self.plan, n_prompt, sampling.max_tokens, goes_on=goes_on)

    def check_options(self, sampling: SamplingParams) -> None:
        """Raises what ``stream`` would for any prompt with these options. Needs the weights."""
        goes_on = sampling.context_full == EVICT_WHEN_FULL
        plan, context = self.cache.plan_prompt(
            1, sampling.max_tokens, goes_on=goes_on, stays_open=True
        )
        check_request(plan, context, sampling, self.model, has_draft=self._draft is not None)

    def stream(
        self, opening: Callable[[], Prompt], sampling: SamplingParams | None, **options: Any
    ) -> GenerationStream:
        """Chunks of the answer to a prompt; options as those of ``_begin``.

        Raises BusyError where another thread reads a stream.
        """
        with self.access.call():
            generation = self._begin(opening, sampling, **options)
            return GenerationStream(generation, self.access, self._current.require)

    def generate(
        self, opening: Callable[[], Prompt], sampling: SamplingParams | None, **options: Any
    ) -> GenerationResult:
        """The whole answer to a prompt; see ``stream``."""
        with self.access.call():
            generation = self._begin(opening, sampling, **options)
            for _ in generation:
                self._current.require(generation)
            return generation.result()

    def embed(
        self,
        openings: Sequence[Callable[[], Prompt]],
        pooling: str | None,
        *,
        lora: Mapping[int, float] | None = None,
    ) -> list[NDArray[np.float32]]:
        """Vectors [model_dim] of prompts, of pooling "none" matrices [n, model_dim].

        What the cache holds is forgotten. Raises as ``choose_pooling``, ``embed_prompt`` and
        ``_begin`` do.
        """
        with self.access.call():
            own = self._scales
            self.cache.use_adapters(own if lora is None else make_scales(lora, len(own)))
            pooling = choose_pooling(self.plan.config, pooling)
            prompts = [opening().encode() for opening in openings]
            config = self.plan.config
            prompts = [ids[: count_read(len(ids), pooling, config)] for ids in prompts]
            vectors: dict[int, NDArray[np.float32]] = {}
            for i in longest_first(list(map(len, prompts))):
                vectors[i] = self._embed(prompts[i], pooling)
            return [vectors[i] for i in range(len(prompts))]

    def _embed(self, token_ids: NDArray[np.int32], pooling: str) -> NDArray[np.float32]:
        """Of one prompt, which is read by the rules of those that are answered."""
        n_tokens, report = len(token_ids), self._on_progress
        choose_context(self.plan, n_tokens, 0)  # no profile is made of one that is too long
        self._learn_from(token_ids, is_kept=True)
        runner = require_rows(self.prepare(n_tokens, 0))
        self.cache.is_open = False
        try:
            calls = plan_calls(0, n_tokens, runner)
            embed = runner.embed if report is None else reporting(runner, n_tokens, report)
            vector = embed_prompt(embed, token_ids, pooling, calls)
            return project(vector, cast("EmbeddingModel", self.model), self.plan.config)
        finally:
            runner.reset()
            release_threads()

    def _begin(
        self,
        opening: Callable[[], Prompt],
        sampling: SamplingParams | None,
        *,
        logprobs: bool = False,
        keep_cache: bool = False,
        processor: LogitsProcessor | None = None,
        grammar: GrammarState | None = None,
        lora: Mapping[int, float] | None = None,
        drawn: DrawnProbabilities | None = None,
    ) -> Generation:
        """Makes room for a prompt and its answer, and ends the prompt before.

        With ``keep_cache`` the cache serves as far as it agrees with the prompt, and stays fit for
        a prompt that goes on from this one. ``lora``: see ``make_scales``; None: as the session
        began. Raises UsageError for a prompt without tokens or longer than the context may be,
        ResourceError with the numbers when that does not fit in memory.
        """
        started_at = time.perf_counter()
        sampling = require_sampling(sampling)
        require_flag("logprobs", logprobs)
        require_flag("keep_cache", keep_cache)
        sampling = sampling if sampling.seed is not None else replace(sampling, seed=self._seed)
        own = self._scales
        self.cache.use_adapters(own if lora is None else make_scales(lora, len(own)))
        prompt = opening()
        token_ids = prompt.encode(self.transcript if keep_cache else None)
        start = self.cache.choose_start(token_ids.tolist(), sampling, keep_cache=keep_cache)
        # What is there stays as it is until nothing can be refused any more.
        check_request(
            start.plan, start.context, sampling, self.model, has_draft=self._draft is not None
        )
        if sampling.schema is not None:
            from .grammar import constrain

            grammar = constrain(sampling.schema, self.model.tokenizer, self.plan.config.vocab_size)
        runner, n_cached = self._take_runner(start, sampling)
        batch_size = self.cache.running.open_batch_size if keep_cache else runner.batch_size
        is_whole = not n_cached and len(token_ids) <= runner.max_context
        length = self.cache.length if keep_cache else len(token_ids)
        learner = self._start_learner(len(token_ids), length) if is_whole else None
        provider = self._draft
        draft = None if provider is None else provider.prepared(sampling, self.cache.length)
        run = self._describe_run(runner, len(token_ids), learns=learner is not None)
        if n_cached:
            runner.rewind(n_cached)
        self.cache.is_open = keep_cache
        text = prompt.transcript
        generation = Generation(
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
            drawn=drawn,
            started_at=started_at,
            run=run,
        )
        sizes = {**weight_sizes(self.model), **runner.memory_bytes}
        if draft is not None:
            sizes.update(draft.memory_bytes)
        generation.describe_run(memory_bytes=sizes)
        self._current.begin(generation, text and text.with_prompt_ids(token_ids.tolist()))
        return generation

    def _describe_run(self, runner: Runner, n_prompt: int, *, learns: bool) -> dict[str, Any]:
        """What the statistics of a prompt say that is known before it is read."""
        running = self.cache.running
        notes = [
            describe_knowledge(running, self.model, n_prompt, learns=learns),
            describe_decode(running, n_prompt),
        ]
        return {
            **running.report(n_prompt),
            "model": str(self.path),
            "load_s": self.load_s,
            "context_size": runner.max_context,
            "note": "; ".join(filter(None, notes)),
        }

    def _take_runner(self, start: Start, sampling: SamplingParams) -> tuple[Runner, int]:
        """As ``PromptCache.begin_at``; the prompt in progress ends, unless nothing has changed."""
        transcript = self.transcript if start.n_kept else None
        with self._current.ending(lambda: self.runner is not None):
            runner, n_cached = self.cache.begin_at(start, sampling)
        self._current.end(transcript if n_cached else None)
        return runner, n_cached

    def _start_learner(self, n_prompt_tokens: int, length: int) -> Learner | None:
        """What looks on while a prompt is read from its beginning, if it is to be profiled.

        ``length`` is what the prompt may grow to.
        """
        if not may_learn(self.cache.running, self.model, n_prompt_tokens):
            return None
        return Learner(
            self.model,
            self.cache.running,
            n_prompt_tokens,
            partial(self._learn_while_reading, length),
            known=self.cache.profile,
        )

    def _learn_while_reading(self, length: int, table: BudgetTable | None) -> None:
        """So does the rest of a prompt that is learning, dense if there is no profile or gain."""
        if table is not None:
            self.cache.learn(table)
        generation, runner = self._current.generation, self.runner
        if generation is None or runner is None or not self.cache.is_learning:
            return
        chooses = self.cache.running.attention.is_learning
        self.cache.end_learning(length, has_learnt=table is not None)
        if table is None:
            return
        generation.describe_run(**self.cache.running.report(generation.n_prompt_tokens))
        if chooses:
            note = f"the first {runner.position:,} tokens read dense and profiled"
            generation.describe_run(note=note + describe_newer(self.model))

    def profile(self, token_ids: NDArray[np.int32], *, is_kept: bool = False) -> bool:
        """Makes a profile of ``token_ids`` [n], if the model lacks one and n suffices.

        Whether it did. Prompts that are answered do so while they are read. Only one that
        ``is_kept`` is known to other processes. Raises ResourceError if it does not fit in memory.
        """
        with self.access.call():
            return self._learn_from(token_ids, is_kept=is_kept)

    def _learn_from(self, token_ids: NDArray[np.int32], *, is_kept: bool) -> bool:
        table = measure_profile(self.plan, self.model, token_ids)
        if table is not None:
            self.cache.learn(keep_profile(table) if is_kept else merge_profiles(None, table))
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
        return self.cache.model

    @property
    def plan(self) -> RunPlan:
        """Of prompts that begin anew, and say nothing of adapters."""
        return self.cache.plan.with_adapters(self._scales)

    @property
    def draft(self) -> DraftProvider | None:
        """Where drafts come from, if a draft model was loaded."""
        return self._draft

    @property
    def runner(self) -> Runner | None:
        """What holds the prompt; None before the first one."""
        return self.cache.runner

    def take_weights(
        self, model: LoadedModel, load_s: float, draft: DraftProvider | None = None
    ) -> None:
        """Makes the session fit to answer; ``load_s`` seconds were needed for it."""
        self.prompts.model = model
        self.cache.take_weights(model)
        self._draft, self.load_s = draft, load_s

    def close(self) -> None:
        """Frees the weights and the cache; the prompt in progress ends with an error."""
        self.cache.close()
        self._prompts = self._draft = None
        self._current.end()

    def prepare(
        self,
        n_prompt: int,
        max_tokens: int,
        plan: RunPlan | None = None,
        goes_on: bool = False,
        stays_open: bool = False,
    ) -> Runner:
        """A runner at position 0 with room for the prompt; see ``PromptCache.plan_prompt``.

        The prompt in progress ends. Raises as ``_begin`` does.
        """
        plan, context = self.cache.plan_prompt(
            n_prompt, max_tokens, plan, goes_on=goes_on, stays_open=stays_open
        )
        with self._current.ending(lambda: self.runner is not None):
            return self.cache.begin_anew(plan, context, n_prompt)

    def begin_as(self, other: Session, n_tokens: int, context: int, n_prompt: int) -> None:
        """Takes up the first ``n_tokens`` of another session; see ``PromptCache.copy_from``."""
        with self.access.call():
            self.cache.copy_from(other.cache, n_tokens, context, n_prompt)
            self._current.end(other._current.prompt)

    def forget(self) -> None:
        """Leaves nothing to go on from, and no word of it to save."""
        with self.access.call():
            self._current.end()
            if self.runner is not None:
                self.runner.reset()

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """That of a session file which is made now."""
        return fingerprint_of(self.cache.running, self.model)

    def save(
        self, path: Path, extra: Mapping[str, Any], require: Callable[[], None] = lambda: None
    ) -> None:
        """Writes a session file; one without a cache if there is only ``extra`` to go on from.

        Or of whose cache something was evicted. Raises UsageError if there is nothing at all, and
        for an ``extra`` that JSON cannot hold, ResourceError for a cache alone with an eviction.
        ``require`` is called between two blocks, and what it raises leaves the path as it was.
        """
        from .session_file import check_extra, write_session

        check_extra(extra)
        with self.access.call():
            transcript, runner = self.transcript, self.runner
            if runner is None or not self.cache.has_open_prompt or (extra and n_evicted(runner)):
                if not extra:
                    raise UsageError(
                        "there is no prompt to save: one must have been read with keep_cache"
                    )
                self._current.generation = None  # whose cache goes
                runner, transcript = self.prepare(0, 0), None
            require_whole(runner)
            runner.rewind(runner.find_mark(runner.position))  # it may be broken
            self._current.forget_drafts()
            write_session(
                path,
                fingerprint=self.fingerprint,
                is_taught=self.cache.running.attention.is_taught,
                precision=self.cache.running.precision,
                state=RunnerState.of(runner),
                rows=runner.cached_rows(),
                document=make_document(transcript, extra),
                context=self.cache.length,
                require=require,
            )

    def load(self, path: Path) -> dict[str, Any]:
        """Takes up a session file; returns its ``extra``."""
        from .session_file import find_answer_room, open_session

        with self.access.call(), ExitStack() as stack:
            plan, vocab_size = self._plan_of_file(path), self.plan.config.vocab_size
            fingerprint = fingerprint_of(plan, self.model)
            saved = stack.enter_context(
                open_session(path, fingerprint=fingerprint, vocab_size=vocab_size)
            )
            transcript, extra = read_document(saved.document, path, vocab_size=vocab_size)
            n_tokens = len(saved.state.token_ids)
            room = find_answer_room(self.plan, path, n_tokens, saved.context)
            runner = self.prepare(n_tokens, room, plan)
            saved.restore(runner)
            self._current.end(transcript)
            self.cache.is_open = True
        return extra

    @property
    def transcript(self) -> Transcript | None:
        """What the cache holds as text, with as much of its answer as there is."""
        return self._current.transcript(lambda: self.prompts.model.tokenizer)

    def check_file(self, path: Path) -> None:
        """Raises UsageError if a session file is of another model or plan; needs no weights."""
        from .session_file import check_session_file

        plan = self._plan_of_file(path).with_adapters(self._scales)
        check_session_file(path, fingerprint_of(plan, self.prompts.model))

    def _plan_of_file(self, path: Path) -> RunPlan:
        """How a saved session goes on: with the budgets that were looked up when it was made."""
        from .session_file import read_settings

        return plan_as_saved(self.plan, read_settings(path))

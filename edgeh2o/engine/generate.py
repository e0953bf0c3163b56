"""The generation loop: prefill in logical batches, then one token at a time."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import EdgeH2OError
from ..host import memory
from ..runners.runner_calls import attention_error, free_positions, mark_where_due, plan_calls
from ..sampling_config import EVICT_WHEN_FULL, STOP_WHEN_FULL, SamplingParams
from .drawing import TokenDrawer
from .full_context import cut_call, make_room, prepare_full_context, shift_context
from .logits import with_penalties
from .results import FinishReason, GenerationResult
from .sampling import make_sampler
from .speculation import start_speculation
from .stats import GenerationStats
from .stop import StopMatcher

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..runners.base import Runner
    from ..tokenizer import Tokenizer
    from .draft_sources import DraftSource
    from .grammar import GrammarState
    from .learning import Learner
    from .logits import DrawnProbabilities, LogitsProcessor

# Short enough to survive JSON readers that keep numbers as doubles.
SEED_BYTES = 4

OnPrefill = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """One token of an answer, with the counters so far.

    ``text`` is what became certain with it: empty while a character or a possible stop text is
    incomplete; the texts of all chunks joined are the answer. ``logprob`` is the natural logarithm
    of the token's probability before any filter, when asked for. ``certain_tokens`` counts those so
    far that are part of the answer for certain: not the ones whose whole text a stop text took away
    or may take. ``finish_reason`` is set on the last chunk, and ``stop_text`` where one of those
    ended the answer.
    """

    text: str
    token_id: int
    logprob: float | None
    prompt_tokens: int
    prefill_tps: float | None
    generated_tokens: int
    certain_tokens: int
    decode_tps: float | None
    finish_reason: FinishReason | None
    stop_text: str = ""


class Generation:
    """One prompt being answered: iterate over it once for its tokens.

    The runner must hold the first ``n_cached`` tokens of the prompt, with room for the rest. With
    ``stays_open`` a later prompt may go on from this one, or from a mark in it; it is read in
    batches of ``batch_size``. ``draft`` guesses tokens, ``learner`` looks on while the prompt is
    read, ``processor`` changes the logits that tokens are drawn from, ``drawn`` notes what those
    are, and ``grammar``, which the caller makes of a schema, says which may be drawn. ``run`` are
    the fields of the statistics that are known before. Counters and times, in seconds, are kept
    while it runs, so that they can be read after an interrupt too. Raises UsageError for drafts
    that the runner cannot check, and for a context that cannot be gone on past.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        prompt: Sequence[int] | NDArray[np.int32],
        sampling: SamplingParams,
        *,
        logprobs: bool = False,
        n_cached: int = 0,
        stays_open: bool = False,
        batch_size: int | None = None,
        on_prefill: OnPrefill | None = None,
        learner: Learner | None = None,
        draft: DraftSource | None = None,
        processor: LogitsProcessor | None = None,
        grammar: GrammarState | None = None,
        drawn: DrawnProbabilities | None = None,
        started_at: float | None = None,
        run: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.n_prompt_tokens = len(prompt)
        self.n_cached_tokens = n_cached
        self.seed = _draw_seed() if sampling.seed is None else sampling.seed
        self.token_ids: list[int] = []  # all that were drawn
        self.n_said = 0  # of them, without those whose whole text a stop text took away
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.n_prefilled_tokens = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.ttft_s: float | None = None
        self.pairs_computed = 0
        self.pairs_dense = 0
        self.attention_error: float | None = None
        self.heads_read_densely = 0
        self.context_shifts = 0
        self.evicted_tokens = 0
        self.is_cut = False  # by whoever reads it: the next token is the last one
        self._bytes_before = runner.decode_bytes
        self._evicts = sampling.context_full == EVICT_WHEN_FULL
        prepare_full_context(runner, sampling.context_full)
        self.runner = runner
        self.speculation = start_speculation(runner, prompt, sampling, draft)
        self.batch_size = min(batch_size or runner.batch_size, runner.batch_size)
        self._prompt = np.asarray(prompt, dtype=np.int32)
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._eog_ids = tokenizer.eog_ids
        self._decoder = tokenizer.decoder(skip_special=True, continues=True)
        self._stop_matcher = StopMatcher(sampling.stop)
        self._text_starts: list[int] = []  # of each token, in characters
        self._n_characters = 0
        self._logprobs: list[float] | None = [] if logprobs else None
        self._run = run
        self._stays_open = stays_open
        self._on_prefill = on_prefill
        self._learner = learner
        self._processor, self._grammar = with_penalties(processor, sampling), grammar
        self._drawn = drawn
        self._started_at = time.perf_counter() if started_at is None else started_at

    @property
    def prefill_tps(self) -> float | None:
        """Prompt tokens per second, None before the first batch is done."""
        return self.n_prefilled_tokens / self.prefill_s if self.n_prefilled_tokens else None

    @property
    def decode_tps(self) -> float | None:
        """Generated tokens per second after the first one, which comes out of the prefill."""
        n_decoded = len(self.token_ids) - 1
        return n_decoded / self.decode_s if n_decoded > 0 else None

    @property
    def cache_bytes_per_token(self) -> float | None:
        """Bytes that were read of the cache for a generated token after the first one."""
        n_decoded, n_bytes = len(self.token_ids) - 1, self.runner.decode_bytes - self._bytes_before
        return n_bytes / n_decoded if n_decoded > 0 and n_bytes > 0 else None

    def __iter__(self) -> Generator[GenerationChunk, None, None]:
        try:
            logits = self._prefill()
            if self._sampling.max_tokens == 0:
                self.finish_reason = "length"
                return
            sampler = make_sampler(
                self._sampling,
                self._tokenizer,
                self._prompt,
                vocab_size=self.runner.vocab_size,
                context_size=self.runner.max_context,
                seed=self.seed,
            )
            drawer = TokenDrawer(sampler, self._processor, self._grammar, self._drawn)
            decode = self.runner.decode
            if self.speculation is not None:
                self.speculation.draw_like(drawer)
                decode = self.speculation.advance
            token = self._next_token(drawer, logits)
            first_token_at = time.perf_counter()
            self.ttft_s = first_token_at - self._started_at
            while True:
                yield token
                if token.finish_reason is not None:
                    return
                if free_positions(self.runner) == 0:
                    self._go_past_context()
                logits = decode(token.token_id)
                token = self._next_token(drawer, logits, first_token_at)
        except KeyboardInterrupt:
            self.finish_reason = "interrupted"
            raise
        finally:
            # Two callers with waiting threads have more than there are cores, which libgomp then
            # puts to sleep at every barrier: 102 for 283 tokens/s of a model of 135M in `serve`.
            _core.release_threads()

    def _prefill(self) -> NDArray[np.float32]:
        """Reads what is new of the prompt; returns the logits after its last token."""
        n_tokens, n_cached = self.n_prompt_tokens, self.n_cached_tokens
        runner = self.runner
        begun_at = time.perf_counter()
        pairs_before = (0, 0) if n_cached == 0 else (runner.pairs_computed, runner.pairs_dense)
        errors_before = np.zeros_like(runner.error_sums) if n_cached == 0 else runner.error_sums
        again_before = 0 if n_cached == 0 else runner.n_dense_reads
        logits = runner.prompt_logits if n_cached == n_tokens else None
        report = self._on_prefill
        if report is not None:
            report(0, n_tokens - n_cached)
        for call in self._plan_calls():
            if self._evicts:
                self.evicted_tokens += make_room(runner, call.stop - call.start)
            self._mark()
            prefill: Callable[..., NDArray[np.float32] | None] = runner.prefill
            if self._learner is not None and call.start == 0:
                prefill = self._learner.watch(runner)
            first = runner.position  # a runner may read the last of these tokens with the next
            logits = prefill(
                self._prompt[call],
                is_last=call.stop == n_tokens,
                stays_open=self._stays_open,
                on_layer=report and partial(self._report_layer, report, call),
            )
            if self.speculation is not None:
                self.speculation.note_rows(first)
            self.n_prefilled_tokens = call.stop - n_cached
            self.prefill_s = time.perf_counter() - begun_at
            self.pairs_computed = runner.pairs_computed - pairs_before[0]
            self.pairs_dense = runner.pairs_dense - pairs_before[1]
            self.attention_error = attention_error(runner.error_sums - errors_before)
            self.heads_read_densely = runner.n_dense_reads - again_before
            if self._learner is not None and call.stop == self._learner.first_call:
                self._learner.finish()
        if logits is None:
            raise ValueError("the runner returned no logits for the last batch of the prompt")
        self._mark()
        if self._learner is not None:
            self._learner.finish()
        return logits

    def _go_past_context(self) -> None:
        """Makes room in a full context, before the latest token is appended."""
        if self._evicts:
            self.evicted_tokens += make_room(self.runner, 1)
            return
        kept = shift_context(
            self.runner, self.n_prompt_tokens, self.batch_size, stays_open=self._stays_open
        )
        self.context_shifts += 1
        if self.speculation is not None:
            self.speculation.begin_again(kept)

    def _plan_calls(self) -> Iterator[slice]:
        """The calls of the prompt: first what has to be learnt from before the rest is read."""
        n_read, n_first = self.n_cached_tokens, self._learner.first_call if self._learner else 0
        if n_first:
            yield from plan_calls(n_read, n_first, self.runner, self.batch_size)
            n_read = n_first
        for call in plan_calls(n_read, self.n_prompt_tokens, self.runner, self.batch_size):
            yield from cut_call(call, self.runner) if self._evicts else (call,)

    def describe_run(self, **run: Any) -> None:
        """What of ``run`` became known while the prompt was read."""
        self._run = {**self._run, **run}

    def _mark(self) -> None:
        if self._stays_open:
            mark_where_due(self.runner)

    def _report_layer(self, report: OnPrefill, call: slice, done: int, total: int) -> None:
        """Turns "layers done" of one batch into "tokens done" of the prompt."""
        n_done = (call.stop - call.start) * done // total + call.start - self.n_cached_tokens
        report(n_done, self.n_prompt_tokens - self.n_cached_tokens)

    def _next_token(
        self, drawer: TokenDrawer, logits: NDArray[np.float32], first_token_at: float | None = None
    ) -> GenerationChunk:
        """Draws a token, its text, and whether it is the last one."""
        try:
            token_id = drawer.draw(drawer.process(logits))
        except EdgeH2OError:  # of the grammar
            raise
        except ValueError as error:
            raise EdgeH2OError(
                f"no token can be drawn: {error}; the model file may be damaged"
            ) from None
        drawer.accept(token_id)
        self.token_ids.append(token_id)
        self.n_said += 1
        text = ""
        if token_id in self._eog_ids:
            self.finish_reason = "stop"
        else:
            piece = self._decoder.push(token_id)
            self._text_starts.append(self._n_characters)
            self._n_characters += len(piece)
            text = self._stop_matcher.push(piece)
            stops = self._sampling.context_full == STOP_WHEN_FULL
            is_full = stops and free_positions(self.runner) == 0
            if self._stop_matcher.stopped:
                self.finish_reason = "stop"
            elif self.is_cut or is_full or len(self.token_ids) == self._sampling.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._stop_matcher.push(self._decoder.finish()) + self._stop_matcher.finish()
        self.text += text
        n_certain = self.n_said
        if self._stop_matcher.stopped or (self._sampling.stop and self.finish_reason is None):
            n_certain = bisect_left(self._text_starts, len(self.text))
        if self._stop_matcher.stopped:
            self.n_said = n_certain
        logprob = None
        if self._logprobs is not None:
            logprob = log_probability(logits, token_id)
            self._logprobs.append(logprob)
        if first_token_at is not None:
            self.decode_s = time.perf_counter() - first_token_at
        return GenerationChunk(
            text=text,
            token_id=token_id,
            logprob=logprob,
            prompt_tokens=self.n_prompt_tokens,
            prefill_tps=self.prefill_tps,
            generated_tokens=len(self.token_ids),
            certain_tokens=n_certain,
            decode_tps=self.decode_tps,
            finish_reason=self.finish_reason,
            stop_text=self._stop_matcher.found,
        )

    def stats(self) -> GenerationStats:
        """Statistics so far."""
        return GenerationStats(
            **self._run,
            batch_size=self.batch_size,
            seed=self.seed,
            prompt_tokens=self.n_prompt_tokens,
            cached_tokens=self.n_cached_tokens,
            generated_tokens=len(self.token_ids),
            prefill_s=self.prefill_s,
            ttft_s=self.ttft_s,
            decode_s=self.decode_s,
            prefill_tps=self.prefill_tps,
            decode_tps=self.decode_tps,
            peak_rss_bytes=memory.peak_rss_bytes(),
            pairs_computed=self.pairs_computed,
            pairs_dense=self.pairs_dense,
            attention_error=self.attention_error,
            heads_read_densely=self.heads_read_densely,
            context_shifts=self.context_shifts,
            evicted_tokens=self.evicted_tokens,
            cache_bytes_per_token=self.cache_bytes_per_token,
            **({} if self.speculation is None else self.speculation.counts()),
        )

    def result(self) -> GenerationResult:
        """Text, tokens and statistics so far."""
        return GenerationResult(
            text=self.text,
            token_ids=tuple(self.token_ids[: self.n_said]),
            logprobs=None if self._logprobs is None else tuple(self._logprobs[: self.n_said]),
            finish_reason=self.finish_reason,
            stats=self.stats(),
        )


def _draw_seed() -> int:
    """As ``secrets`` has it, whose import would take 5 ms."""
    return int.from_bytes(os.urandom(SEED_BYTES), "little")


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Natural logarithm of softmax(logits)[token], in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token] - np.log(np.exp(shifted).sum()))

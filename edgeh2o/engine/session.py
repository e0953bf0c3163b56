"""Sizes a session for a prompt, checks that it fits in memory, and reuses it for the next one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .. import isa
from ..attention.base import SparseAttentionConfig
from ..config import PrefillConfig, RuntimeConfig
from ..errors import ResourceError, UsageError
from ..host import memory
from ..runners.base import RunnableModel, Runner, RunnerState, SessionShape

MIN_DEFAULT_CONTEXT = 4096
CONTEXT_STEP = 256
# Room for an answer of open length (max_tokens = -1) when the context is sized by default.
OPEN_ANSWER_TOKENS = 1024
# Left to the interpreter and its libraries when memory is counted.
RESERVE_BYTES = 64 * 2**20

SessionEstimate = Callable[[SessionShape], Mapping[str, int]]


class Session:
    """Holds the runner of one model and reallocates it only when a prompt needs more context."""

    def __init__(
        self,
        model: RunnableModel,
        *,
        attention: SparseAttentionConfig,
        prefill: PrefillConfig,
        runtime: RuntimeConfig,
        all_rows: bool = False,
    ) -> None:
        self._model = model
        self._attention = attention
        self._prefill = prefill
        self._runtime = runtime
        self._all_rows = all_rows
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner | None:
        """The runner in use, None before the first prompt."""
        return self._runner

    def prepare(self, n_prompt_tokens: int, max_tokens: int) -> Runner:
        """A runner at position 0 with room for the prompt.

        Raises UsageError when the prompt is longer than the context may be, and ResourceError
        with the numbers when the context does not fit in memory.
        """
        needed = self._choose_context(n_prompt_tokens, max_tokens)
        if self._runner is not None:
            if self._runner.max_context >= needed:
                self._runner.reset()
                return self._runner
            self._runner = None
        self._runner = self._start(needed)
        return self._runner

    def resume(self, prompt: Sequence[int], max_tokens: int) -> tuple[Runner, int]:
        """A runner that holds a beginning of the prompt, and the number of its tokens.

        The cache is kept as far as it agrees with the prompt, and grows with its contents where
        it is too short. What a sparse prefill has read cannot be taken back singly: a prompt
        that departs from it earlier begins anew, with 0 tokens. Raises as ``prepare`` does.
        """
        runner = self._runner
        if runner is None or runner.prompt_logits is None:
            return self.prepare(len(prompt), max_tokens), 0
        n_kept = _count_common(runner.token_ids, prompt)
        if n_kept == len(prompt) > runner.prefill_end:
            n_kept -= 1  # the logits after the last token are needed
        needed = self._choose_context(len(prompt), max_tokens)
        if n_kept < runner.prefill_end or (
            runner.max_context < needed and not self._grow(runner, needed)
        ):
            return self.prepare(len(prompt), max_tokens), 0
        runner = self._require_runner()
        runner.rewind(n_kept)
        return runner, n_kept

    def restore(self, state: RunnerState, max_tokens: int = -1) -> Runner:
        """A runner that has taken up ``state``; its rows are still to be filled."""
        runner = self.prepare(len(state.token_ids), max_tokens)
        runner.import_state(state)
        return runner

    def _grow(self, old: Runner, needed: int) -> bool:
        """Moves to a longer context; False if the attention's rule cannot be moved."""
        try:
            state = old.export_state()
        except UsageError:
            return False
        trained = self._model.context_length
        # Twice as long, lest a chat moves at every turn.
        self._runner = self._start(max(needed, min(trained, 2 * old.max_context)))
        self._runner.import_state(state)
        for rows, copy in zip(old.cached_rows(), self._runner.cached_rows(), strict=True):
            copy[:] = rows
        return True

    def _choose_context(self, n_prompt_tokens: int, max_tokens: int) -> int:
        return choose_context(
            n_prompt_tokens,
            max_tokens,
            requested=self._runtime.context_size,
            trained=self._model.context_length,
        )

    def _start(self, context: int) -> Runner:
        shape = plan_shape(
            context, self._attention, self._prefill, self._runtime, all_rows=self._all_rows
        )
        require_fit(shape, lambda s: self._model.estimate_session_bytes(self._attention, s))
        return self._model.start_session(self._attention, shape)

    def _require_runner(self) -> Runner:
        assert self._runner is not None, "prepare or _grow made one"
        return self._runner


def _count_common(known: Sequence[int], prompt: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = zip(known, prompt, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), len(prompt)))


def choose_context(
    n_prompt_tokens: int, max_tokens: int, *, requested: int | None, trained: int
) -> int:
    """Positions to allocate for a prompt and its answer.

    ``requested`` is taken as it is (0 = ``trained``). Without it: what the prompt and the answer
    need, at least ``MIN_DEFAULT_CONTEXT`` and at most ``trained``. Raises UsageError when the
    prompt alone is longer.
    """
    if requested is not None:
        context = requested or trained
        cure = f"use -c {n_prompt_tokens} or more" if n_prompt_tokens <= trained else ""
    else:
        answer = OPEN_ANSWER_TOKENS if max_tokens < 0 else max_tokens
        needed = -(-(n_prompt_tokens + answer) // CONTEXT_STEP) * CONTEXT_STEP
        context = min(trained, max(MIN_DEFAULT_CONTEXT, needed))
        cure = ""
    if n_prompt_tokens > context:
        cure = cure or f"shorten it: the model was trained on {trained} positions"
        raise UsageError(
            f"the prompt has {n_prompt_tokens} tokens and the context holds {context}; {cure}"
        )
    return context


def warn_beyond_training(requested: int | None, trained: int) -> None:
    """Warns when the requested context is longer than what the model was trained on."""
    if requested is not None and requested > trained:
        warnings.warn(
            f"a context of {requested} is longer than the {trained} positions that the model was "
            "trained on; expect poor answers beyond them",
            stacklevel=3,
        )


def fit_chunks(
    attention: SparseAttentionConfig, prefill: PrefillConfig
) -> tuple[SparseAttentionConfig, PrefillConfig]:
    """Both settings made to agree: the algorithm's chunk size unless one is set, and its limits.

    Raises UsageError for a batch that is not made of whole chunks.
    """
    prefill, chunk_size = prefill.with_chunk_size(attention.preferred_chunk_size)
    return attention.clamped(chunk_size), prefill


def plan_shape(
    context: int,
    attention: SparseAttentionConfig,
    prefill: PrefillConfig,
    runtime: RuntimeConfig,
    *,
    all_rows: bool = False,
) -> SessionShape:
    """The session's sizes; a batch never exceeds the context rounded up to whole chunks."""
    prefill, chunk_size = prefill.with_chunk_size(attention.preferred_chunk_size)
    return SessionShape(
        max_context=context,
        batch_size=min(prefill.batch_size, -(-context // chunk_size) * chunk_size),
        chunk_size=chunk_size,
        cache_type=runtime.cache_type,
        precision=isa.attention_precision(runtime.attention_precision),
        all_rows=all_rows,
    )


def require_fit(shape: SessionShape, estimate: SessionEstimate, *, weight_bytes: int = 0) -> None:
    """Raises ResourceError, before anything is allocated, when memory would not suffice.

    ``weight_bytes`` are weights yet to be loaded. The message gives the parts, what is available
    and the largest context that fits.
    """
    budget = memory.available_bytes() - RESERVE_BYTES - weight_bytes
    parts = estimate(shape)
    if sum(parts.values()) <= budget:
        return
    listed = dict(parts)
    if weight_bytes:
        listed["weights"] = weight_bytes
    breakdown = ", ".join(
        f"{name.replace('_', ' ')} {memory.format_bytes(size)}" for name, size in listed.items()
    )
    largest = _largest_context(shape, estimate, budget)
    if largest:
        cure = f"the largest context that fits is -c {largest}"
    else:
        cure = "no context fits: free memory, use a smaller model or smaller -b and -ub"
    raise ResourceError(
        f"a context of {shape.max_context} positions needs "
        f"{memory.format_bytes(sum(listed.values()))} ({breakdown}) and "
        f"{memory.format_bytes(max(0, budget + weight_bytes))} are available; {cure}"
    )


def find_largest_context(
    shape: SessionShape, estimate: SessionEstimate, *, weight_bytes: int = 0
) -> int:
    """The longest context up to that of ``shape`` that fits in memory now, 0 if none does."""
    budget = memory.available_bytes() - RESERVE_BYTES - weight_bytes
    if sum(estimate(shape).values()) <= budget:
        return shape.max_context
    return _largest_context(shape, estimate, budget)


def _largest_context(shape: SessionShape, estimate: SessionEstimate, budget: int) -> int:
    """The largest multiple of ``CONTEXT_STEP`` below the shape's context that fits, or 0."""
    low, high = 0, -(-shape.max_context // CONTEXT_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        candidate = replace(shape, max_context=middle * CONTEXT_STEP)
        if sum(estimate(candidate).values()) <= budget:
            low = middle
        else:
            high = middle
    return low * CONTEXT_STEP

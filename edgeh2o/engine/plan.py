"""How a model is run, chosen once: attention, chunks, number types, threads, context, memory."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import isa as instruction_sets
from ..attention.base import SparseAttentionConfig
from ..attention.dense import DenseConfig
from ..attention.kept_profiles import PROFILE_TOKENS
from ..attention.registry import make_sparse_attention
from ..config import PrefillConfig, RuntimeConfig
from ..errors import UsageError
from ..host.threads import default_thread_count
from ..model_config import DecoderConfig, ModelConfig
from ..option_fields import MAX_CONTEXT
from ..rope_config import ROPE_OF_FILE, RopeConfig
from ..runners.base import SessionShape
from .memory_fit import (
    CONTEXT_STEP,
    SessionEstimate,
    SessionSizes,
    find_room,
    of_host,
    require_fit,
    with_draft,
)
from .precisions import AttentionPrecisions

if TYPE_CHECKING:
    from ..runners.base import Runner
    from .models import DescribedModel, LoadedModel, ModelFile

MIN_DEFAULT_CONTEXT = 4096
# Room for an answer of open length (max_tokens = -1) when the context is sized by default.
OPEN_ANSWER_TOKENS = 1024
# Of a call of a prompt that stays open: what an interrupt can lose.
OPEN_BATCH_TOKENS = 1024
# Of every call and layer, to measure the error of a sparse attention.
CHECKED_ROWS = 16


def fit_chunks(
    attention: SparseAttentionConfig, prefill: PrefillConfig, *, on_gpu: bool = False
) -> tuple[SparseAttentionConfig, int]:
    """The attention within the limits of its chunk size, and that: its own unless one is set.

    Raises UsageError for a batch that is not made of whole chunks, and for other than a
    ``PrefillConfig``.
    """
    if not isinstance(prefill, PrefillConfig):
        raise UsageError(f"prefill must be PrefillConfig(...), got {prefill!r:.80}")
    preferred = attention.preferred_chunk_size
    if on_gpu:
        preferred = attention.gpu_chunk_size or preferred
    _, chunk_size = prefill.with_chunk_size(preferred)
    return attention.clamped(chunk_size), chunk_size


def _fit_model(
    config: ModelConfig, attention: SparseAttentionConfig, prefill: PrefillConfig
) -> SparseAttentionConfig:
    """The attention, or dense where the model itself chooses and nothing was asked for.

    Dense is what its indexer chooses from. Raises UsageError for another rule beside it.
    """
    if not config.index_top_k or isinstance(attention, DenseConfig):
        return attention
    default = make_sparse_attention(None)
    with warnings.catch_warnings():  # they were shown for what was asked for
        warnings.simplefilter("ignore")
        if attention in (default, fit_chunks(default, prefill)[0]):
            return DenseConfig()
    raise UsageError(
        f"queries of this model ({config.architecture}) read what its own indexer chooses, so that "
        f"'{attention.describe()}' would choose a second time; leave --attention and its flags out"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One model and everything that was chosen for it.

    ``settings`` is the attention as asked for, ``attention`` what it is for this model: its budgets
    are looked up here and nowhere else. ``prefill`` is as asked for too; its chunks may be left
    open. ``context_size`` is what ``RuntimeConfig`` says, ``cache_type`` its ``cache_types``,
    ``precision`` that of the products of prefill attention, one of ``precisions``; ``device`` says
    where the model computes, and ``has_device_memory`` that this takes no memory of the host:
    models on it check their own. ``gpu_rate`` is how fast a GPU is
    (``cuda.devices.product_rate``), 0 if that is not known. ``rope`` is what the rotary embedding
    has other than the file says.
    """

    config: ModelConfig
    settings: SparseAttentionConfig
    attention: SparseAttentionConfig
    prefill: PrefillConfig
    chunk_size: int
    context_size: int | None
    cache_type: str
    precision: str
    precisions: AttentionPrecisions
    threads: int
    isa: str
    device: str = "cpu"
    has_device_memory: bool = False
    gpu_rate: float = 0.0
    rope: RopeConfig = ROPE_OF_FILE

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        attention: SparseAttentionConfig,
        prefill: PrefillConfig,
        runtime: RuntimeConfig,
        device: str = "cpu",
        has_device_memory: bool = False,
        gpu_rate: float = 0.0,
    ) -> RunPlan:
        """Chooses what the settings leave open, for this machine.

        Raises UsageError for settings that do not fit together, this machine or the model, and
        FormatError for a budget table that cannot be used.
        """
        attention = _fit_model(config, attention, prefill)
        settings, chunk_size = fit_chunks(attention, prefill, on_gpu=device != "cpu")
        precisions = AttentionPrecisions.of(config, runtime, device)
        return cls(
            config=config,
            settings=settings,
            attention=settings.resolved(config),
            prefill=prefill,
            chunk_size=chunk_size,
            context_size=runtime.context_size,
            cache_type=runtime.cache_types,
            precision=precisions.exact,
            precisions=precisions,
            threads=runtime.threads or default_thread_count(),
            isa=instruction_sets.active(),
            device=device,
            has_device_memory=has_device_memory,
            gpu_rate=gpu_rate,
            rope=runtime.rope,
        )

    def fingerprint(self, model: DescribedModel) -> Mapping[str, Any]:
        """What a session file must agree with: the model and, budgets included, how it is run."""
        rope, config = self.rope.to_dict(), self.config
        is_balanced = False
        if isinstance(config, DecoderConfig) and not self.is_on_gpu:
            # Such keys are cached in other sizes than on a GPU: cpp/model/key_balance.h.
            is_balanced = config.has_key_bias or config.qk_norm != "none"
        return {
            "model": model.fingerprint,
            **({"rope": rope} if rope else {}),
            **({"keys": "balanced"} if is_balanced else {}),
            "attention": self.attention.to_dict(),
            "chunk_size": self.chunk_size,
            "cache_type": self.cache_type,
        }

    def report(self) -> dict[str, Any]:
        """What statistics say of it, by field of ``GenerationStats``."""
        return {
            "isa": self.isa,
            "device": self.device,
            "threads": self.threads,
            "attention": self.attention.report(self.config),
            "chunk_size": self.chunk_size,
            "cache_type": self.cache_type,
            "attention_precision": self.precision,
        }

    def varied(
        self, attention: SparseAttentionConfig | None = None, prefill: PrefillConfig | None = None
    ) -> RunPlan:
        """The same with another attention or other chunks."""
        prefill = prefill or self.prefill
        attention = _fit_model(self.config, attention or self.settings, prefill)
        if (attention, prefill) == (self.settings, self.prefill):
            return self
        settings, chunk_size = fit_chunks(attention, prefill, on_gpu=self.is_on_gpu)
        resolved = self.attention if settings == self.settings else settings.resolved(self.config)
        return replace(
            self, settings=settings, attention=resolved, prefill=prefill, chunk_size=chunk_size
        )

    def for_length(self, n_tokens: int) -> RunPlan:
        """The same with budgets and precision of a prompt so long, where nobody has said others."""
        budget = self.settings.budget_for(self.attention, n_tokens)
        plan = self if budget is None else self._with_budget(budget)
        return plan.rounding_for(n_tokens)

    def rounding_for(self, n_tokens: int) -> RunPlan:
        """The same with the precision of a prompt so long."""
        precision = self.precisions.choose(self.attention, n_tokens)
        return self if precision == self.precision else replace(self, precision=precision)

    def _with_budget(self, budget: int) -> RunPlan:
        if budget == self.attention.mean_budget:
            return self
        attention = self.settings.with_budget(self.attention, self.config, budget)
        return replace(self, attention=attention)

    def may_go_on_by(self, running: RunPlan, n_kept: int, n_prompt: int, context: int) -> bool:
        """Whether a prompt may go on by the plan by which ``n_kept`` of its tokens were read.

        Not where budgets for a shorter prompt would read most of one that is to have larger ones in
        so long a ``context``. A conversation that grows by less keeps those it began with: every
        sequence has one plan, and to read it anew at every turn would cost more.
        """
        if 2 * n_kept >= n_prompt:
            return True
        shortest, wanted = (self.settings.budget_for(self.attention, n) for n in (0, context))
        held = running.attention.mean_budget
        return wanted is None or wanted == shortest or held is None or held >= wanted

    def rotates_alike(self, context: int, other: int) -> bool:
        """Whether sessions of so many positions each rotate keys alike, which LongRoPE may not."""
        config = self.config
        if not isinstance(config, DecoderConfig) or not config.long_rope_inv_freq:
            return True
        return (context > config.long_rope_after) == (other > config.long_rope_after)

    def reading_all(self, *, saves_time: bool = False) -> RunPlan:
        """The same for a prompt that is read dense: in the chunks that suit that, if it may."""
        plan = self.reading_all_on(saves_time=saves_time)
        return replace(plan, chunk_size=max(self._dense_chunks))

    def reading_all_on(self, *, saves_time: bool = False) -> RunPlan:
        """The same for the rest of a prompt that is read dense: its chunks stay as they are."""
        return replace(self, attention=self.attention.reading_all(saves_time=saves_time))

    def evicting(self) -> RunPlan:
        """The same for a prompt of whose cache something may be evicted.

        What generated tokens read is chosen at its end and no later; unless it was asked for they
        read everything then.
        """
        if not self.settings.leaves_decode_open:
            return self
        return replace(self, attention=self.attention.decoding_densely())

    def learning(self, context: int) -> RunPlan:
        """The same for a prompt that is profiled, in a session of ``context`` positions.

        Its first ``PROFILE_TOKENS`` are read dense and the rest by their profile where that can be,
        else all of it is read dense.
        """
        attention = self.settings.learning(self.config, context)
        if attention is None or PROFILE_TOKENS % self.chunk_size:
            return self.reading_all()
        return replace(self, attention=attention)

    @property
    def waits_for_profile(self) -> bool:
        """Whether the rest of a prompt goes by what its first ``PROFILE_TOKENS`` teach.

        By budgets, or, where all of it is read dense, in 8 bits if these are shown to be harmless.
        """
        attention = self.attention
        if attention.is_learning:
            return True
        may_round = self.precisions.may_round and isinstance(self.config, DecoderConfig)
        is_unknown = attention.reads_all and attention.profiled_prompts == 0
        return may_round and is_unknown and PROFILE_TOKENS % self.chunk_size == 0

    def staying_exact(self) -> RunPlan:
        """The same with products in 8 bits for no prompt."""
        exact = replace(self.precisions, rounded=self.precisions.exact)
        return replace(self, precisions=exact)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the model computes on a GPU."""
        return self.device != "cpu"

    @property
    def _dense_chunks(self) -> set[int]:
        """Tokens of a chunk that a prompt which is read dense may have."""
        return self._free_chunks(DenseConfig.preferred_chunk_size)

    def _free_chunks(self, *sizes: int) -> set[int]:
        """The plan's own tokens of a chunk, and ``sizes`` where none were asked for."""
        is_free = self.prefill.chunk_size is None
        fitting = {size for size in sizes if is_free and self.prefill.batch_size % size == 0}
        return {self.chunk_size, *fitting}

    def holding(self, saved: Mapping[str, Any]) -> RunPlan:
        """The same as a session file was made, by what ``read_settings`` gives of it.

        That is its budgets, and its precision where it may be that of a prompt here too.
        """
        plan, precision = self._holding_budgets(saved), saved.get("precision")
        if precision not in (self.precisions.exact, self.precisions.rounded):
            return plan  # of another machine, or asked for
        alone = AttentionPrecisions(precision, precision)
        return replace(plan, precision=precision, precisions=alone)

    def _holding_budgets(self, saved: Mapping[str, Any]) -> RunPlan:
        values, chunk_size = saved.get("attention"), saved.get("chunk_size")
        if not isinstance(values, Mapping) or values.get("algorithm") != self.settings.algorithm:
            return self
        attention = self.settings.holding({**values, "is_taught": saved.get("is_taught")})
        if attention is self.settings or not attention.fits(self.config):
            return self
        # Those of a file that was written elsewhere, on a GPU or a CPU, too.
        sizes = [DenseConfig.preferred_chunk_size, attention.preferred_chunk_size]
        possible = self._free_chunks(*sizes, attention.gpu_chunk_size or sizes[0])
        if not isinstance(chunk_size, int) or chunk_size not in possible:
            return self
        plan = replace(
            self,
            settings=attention,
            attention=attention.resolved(self.config),
            chunk_size=chunk_size,
        )
        return replace(plan.of_saved_length(values), settings=self.settings)

    def of_saved(self, saved: Mapping[str, Any], model: DescribedModel) -> RunPlan | None:
        """By the fingerprint of a session file: these settings, for a prompt as long as its own.

        Or for one that was read dense, as sparse would not have been faster. None for a file of
        another model, or that was run otherwise.
        """
        values = saved.get("attention")
        own = self.of_saved_length(values) if isinstance(values, Mapping) else self
        for plan in (own, self.reading_all(saves_time=True)):
            # As it comes out of a file.
            if json.loads(json.dumps(plan.fingerprint(model))) == saved:
                return plan
        return None

    def of_saved_length(self, values: Mapping[str, Any]) -> RunPlan:
        """The same with the budget of a longer prompt, if a saved attention has that.

        Whether it has it in the same heads its fingerprint tells.
        """
        saved, shortest = values.get("budget"), self.settings.budget_for(self.attention, 0)
        if type(saved) is not int or shortest is None or not shortest < saved <= MAX_CONTEXT:
            return self
        return self._with_budget(saved)

    @property
    def least_context(self) -> int:
        """Positions that any run needs: those asked for, else those of a short prompt."""
        trained = self.config.context_length
        if self.context_size is None:
            return min(MIN_DEFAULT_CONTEXT, trained)
        return self.context_size or trained

    def choose_context(
        self, n_prompt_tokens: int, max_tokens: int, *, goes_on: bool = False
    ) -> int:
        """Positions to allocate for a prompt and its answer.

        ``context_size`` is taken as it is (0 = the trained length). Without it: what both need, at
        least ``MIN_DEFAULT_CONTEXT`` and at most the trained length. Raises UsageError, with a
        context that leaves room for the answer, when the prompt alone is longer, unless it
        ``goes_on`` past it.
        """
        trained = self.config.context_length
        context = self.least_context
        answer = OPEN_ANSWER_TOKENS if max_tokens < 0 else max_tokens
        if self.context_size is None:
            needed = -(-(n_prompt_tokens + answer) // CONTEXT_STEP) * CONTEXT_STEP
            context = max(context, min(trained, needed))
        if n_prompt_tokens > context and not goes_on:
            wanted = n_prompt_tokens + answer
            cure = f"use -c {min(wanted, trained)} or more"
            if n_prompt_tokens > trained:
                cure = (
                    f"shorten it, or use -c {wanted} to read it all the same, beyond the {trained} "
                    "positions that the model was trained on"
                )
                if self.rope == ROPE_OF_FILE:
                    scale = -(-wanted // trained)
                    cure += f", perhaps with --rope-scaling yarn --rope-scale {scale}"
            raise UsageError(
                f"the prompt has {n_prompt_tokens} tokens and the context holds {context}; {cure}"
            )
        return context

    def check_load(
        self, file: ModelFile, draft_session: Callable[[int], int] | None = None
    ) -> None:
        """Raises ResourceError if weights and the least context do not fit in memory.

        ``draft_session`` says what that of a draft model takes besides, by its context. Warns when
        the context asked for is longer than what the model was trained on.
        """
        weight_bytes = 0 if self.has_device_memory else file.n_weight_bytes
        room = find_room(self.threads, weight_bytes, file.n_mapped_bytes)
        estimate: SessionEstimate = file.estimate_session_bytes
        if draft_session is not None:
            estimate = with_draft(estimate, draft_session)
        plan = self.for_length(self.least_context)
        sizes = plan.host_sizes(self.shape(self.least_context), estimate)
        require_fit(self.least_context, sizes, room, weight_bytes=weight_bytes)
        trained = self.config.context_length
        if (self.context_size or 0) > trained:
            warnings.warn(
                f"a context of {self.context_size} is longer than the {trained} positions that "
                "the model was trained on; expect poor answers beyond them"
                + ("" if self.rope != ROPE_OF_FILE else "; --rope-scaling yarn helps"),
                stacklevel=3,
            )

    def shape(self, context: int, *, all_rows: bool = False) -> SessionShape:
        """The session's sizes; a batch never exceeds the context rounded up to whole chunks."""
        batch_size = min(self._batch_size, -(-context // self.chunk_size) * self.chunk_size)
        percent = self._error_percent
        return SessionShape(
            max_context=context,
            batch_size=batch_size,
            chunk_size=self.chunk_size,
            cache_type=self.cache_type,
            precision=self.precision,
            threads=self.threads,
            all_rows=all_rows,
            checked_rows=CHECKED_ROWS,
            error_limit=math.inf if percent is None else (percent / 100) ** 2,
        )

    @property
    def _error_percent(self) -> float | None:
        """What the guard allows the attention to err by, None for everything."""
        if self.prefill.max_error is not None:
            return self.prefill.max_error
        return self.settings.default_max_error(self.attention)

    @property
    def _batch_size(self) -> int:
        """Tokens of one call: fewer, unless asked for, where their queries are many numbers."""
        is_latent = isinstance(self.config, DecoderConfig) and self.config.latent is not None
        return self.open_batch_size if is_latent else self.prefill.batch_size

    @property
    def open_batch_size(self) -> int:
        """Tokens of one call of a prompt that stays open, unless a batch size was asked for."""
        if self.prefill.batch_size != PrefillConfig().batch_size:
            return self.prefill.batch_size
        return max(1, OPEN_BATCH_TOKENS // self.chunk_size) * self.chunk_size

    def start_runner(self, model: LoadedModel, context: int, *, all_rows: bool = False) -> Runner:
        """A runner with room for ``context`` tokens. Raises ResourceError if it does not fit."""
        shape = self.shape(context, all_rows=all_rows)
        self.check_start(model, shape)
        return model.start_session(self.attention, shape)

    def check_start(self, model: LoadedModel, shape: SessionShape, freed_bytes: int = 0) -> None:
        """Raises ResourceError if a runner does not fit, once ``freed_bytes`` more are free."""
        context = shape.max_context
        is_checked = self.context_size is not None and context == self.least_context
        room = find_room(self.threads, is_checked=is_checked) + freed_bytes
        require_fit(context, self.host_sizes(shape, model.estimate_session_bytes), room)

    def host_sizes(self, shape: SessionShape, estimate: SessionEstimate) -> SessionSizes:
        """As ``session_sizes``, of the host's memory alone."""
        return self.session_sizes(shape, of_host(estimate) if self.has_device_memory else estimate)

    def session_sizes(self, shape: SessionShape, estimate: SessionEstimate) -> SessionSizes:
        """What sessions of ``shape`` take, those of other lengths by their budgets."""

        def sizes(context: int) -> Mapping[str, int]:
            plan = self if context == shape.max_context else self.for_length(context)
            return estimate(plan.attention, replace(shape, max_context=context))

        return sizes

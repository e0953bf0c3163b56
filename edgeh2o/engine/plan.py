"""How a model is run and its prompts are read, chosen once: attention, chunks, types, threads."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

from .. import isa as instruction_sets
from ..attention.base import SparseAttentionConfig
from ..attention.dense import DenseConfig
from ..attention.kept_profiles import PROFILE_TOKENS
from ..attention.registry import make_sparse_attention
from ..config import PrefillConfig, RuntimeConfig
from ..errors import UsageError
from ..host.threads import default_thread_count
from ..model_config import DecoderConfig, ModelConfig
from ..rope_config import ROPE_OF_FILE, RopeConfig
from ..runners.base import SessionShape
from .precisions import AttentionPrecisions

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
    """The attention, or dense where the model can have no other and nothing was asked for.

    Dense is what its indexer chooses from, what reads a text to both sides, and what has a bias by
    distance. Raises UsageError for another rule beside it.
    """
    may_choose = config.is_causal and not config.index_top_k and not config.has_distance_bias
    if isinstance(attention, DenseConfig) or may_choose:
        return attention
    default = make_sparse_attention(None)
    with warnings.catch_warnings():  # they were shown for what was asked for
        warnings.simplefilter("ignore")
        if attention in (default, fit_chunks(default, prefill)[0]):
            return DenseConfig()
    if not config.is_causal:
        raise UsageError(
            f"tokens of this model ({config.architecture}) read those behind them too, and all of "
            f"them: '{attention.describe()}' is for models that write; leave --attention and its "
            "flags out"
        )
    if config.has_distance_bias:
        raise UsageError(
            f"attention of this model ({config.architecture}) has a bias by distance (ALiBi) and "
            f"reads everything: '{attention.describe()}' is for models without; leave --attention "
            "and its flags out"
        )
    raise UsageError(
        f"queries of this model ({config.architecture}) read what its own indexer chooses, so that "
        f"'{attention.describe()}' would choose a second time; leave --attention and its flags out"
    )


def _check_positions(config: ModelConfig, context: int) -> None:
    if 0 < config.most_positions < context:
        raise UsageError(
            f"a context of {context} is longer than the table of {config.most_positions} positions "
            f"that this model ({config.architecture}) has; use {config.most_positions} (-c) or less"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One model and everything that was chosen for it.

    ``settings`` is the attention as asked for, ``attention`` what it is for this model: its budgets
    are looked up here and nowhere else. ``prefill`` is as asked for too; its chunks may be left
    open. ``context_size`` is what ``RuntimeConfig`` says, ``most_context`` the positions that
    memory holds where nobody says it and those of a short prompt, or of a server all that the model
    was trained on, are too many, ``cache_type`` its ``cache_types``,
    ``precision`` that of the products of prefill attention, one of ``precisions``; ``device`` says
    where the model computes, and ``has_device_memory`` that this takes no memory of the host.
    ``gpu_rate`` is how fast a GPU is (``cuda.devices.product_rate``), 0 if that is not known.
    ``rope`` is what the rotary embedding has other than the file says, ``adapter_scales`` what the
    adapters of the model count (LoRA).
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
    most_context: int | None = None
    adapter_scales: tuple[float, ...] = ()

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
        _check_positions(config, runtime.context_size or 0)
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
            adapter_scales=config.adapter_scales if isinstance(config, DecoderConfig) else (),
        )

    def report(self, n_tokens: int | None = None) -> dict[str, Any]:
        """What statistics say of it, by field of ``GenerationStats``: of a prompt so long."""
        return {
            "isa": self.isa,
            "device": self.device,
            "threads": self.threads,
            "attention": self.attention.report(self.config, n_tokens),
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
        plan = self if budget is None else self.with_budget(budget)
        return plan.rounding_for(n_tokens)

    def rounding_for(self, n_tokens: int) -> RunPlan:
        """The same with the precision of a prompt so long."""
        precision = self.precisions.choose(self.attention, n_tokens)
        return self if precision == self.precision else replace(self, precision=precision)

    def with_budget(self, budget: int) -> RunPlan:
        """The same with so many keys of the past per query."""
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

    def reading_all(self, *, saves_time: bool = False) -> RunPlan:
        """The same for a prompt that is read dense: in the chunks that suit that, if it may."""
        plan = self.reading_all_on(saves_time=saves_time)
        chunk_size = max(self.free_chunks(DenseConfig.preferred_chunk_size))
        return replace(plan, chunk_size=chunk_size)

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

    def with_adapters(self, scales: tuple[float, ...]) -> RunPlan:
        """The same with adapters that count so much."""
        return self if scales == self.adapter_scales else replace(self, adapter_scales=scales)

    def staying_exact(self) -> RunPlan:
        """The same with products in 8 bits for no prompt."""
        exact = replace(self.precisions, rounded=self.precisions.exact)
        return replace(self, precisions=exact)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the model computes on a GPU."""
        return self.device != "cpu"

    def free_chunks(self, *sizes: int) -> set[int]:
        """The plan's own tokens of a chunk, and ``sizes`` where none were asked for."""
        is_free = self.prefill.chunk_size is None
        fitting = {size for size in sizes if is_free and self.prefill.batch_size % size == 0}
        return {self.chunk_size, *fitting}

    def shape(self, context: int, *, all_rows: bool = False) -> SessionShape:
        """The session's sizes; a batch never exceeds the context rounded up to whole chunks.

        Of a model that is not causal it is the context.

        Raises UsageError for a context beyond what the model has positions for.
        """
        _check_positions(self.config, context)
        chunk_size = self.chunk_size
        batch_size = min(self._batch_size, -(-context // chunk_size) * chunk_size)
        if not self.config.is_causal:  # a text is read in one call
            batch_size = chunk_size = context
        percent = self._error_percent
        return SessionShape(
            max_context=context,
            batch_size=batch_size,
            chunk_size=chunk_size,
            cache_type=self.cache_type,
            precision=self.precision,
            threads=self.threads,
            all_rows=all_rows,
            checked_rows=CHECKED_ROWS,
            error_limit=math.inf if percent is None else (percent / 100) ** 2,
            adapter_scales=self.adapter_scales,
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

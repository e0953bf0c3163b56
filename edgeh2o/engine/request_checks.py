"""What a request may ask of a runner, before the one that is there is touched for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import RuntimeConfig
from ..errors import UsageError
from ..sampling_config import DRAFT_OFF, EVICT_WHEN_FULL, SamplingParams
from .drafting import why_single_tokens
from .full_context import check_eviction, check_length, no_eviction
from .speculation import refuse_drafts

if TYPE_CHECKING:
    from ..attention.base import SparseAttentionConfig
    from ..model_config import ModelConfig
    from .models import LoadedModel
    from .plan import RunPlan


def require_sampling(sampling: SamplingParams | None) -> SamplingParams:
    """Those of a request that says nothing are the usual ones. Raises UsageError."""
    if sampling is None:
        return SamplingParams()
    if not isinstance(sampling, SamplingParams):
        raise UsageError(f"sampling must be SamplingParams(...), got {sampling!r:.80}")
    return sampling


def check_settings(
    sampling: SamplingParams, runtime: RuntimeConfig, attention: SparseAttentionConfig
) -> None:
    """Raises UsageError for what no model answers by; a model may refuse more (check_request)."""
    if runtime.context_size:
        check_length(runtime.context_size, sampling.context_full)
    if sampling.context_full != EVICT_WHEN_FULL:
        return
    if runtime.device.startswith("cuda"):
        raise no_eviction()
    if attention.chooses_in_decode:
        raise UsageError(
            f"{attention.algorithm} says what generated tokens read, which an eviction of "
            "--context-full evict would change; use --context-full shift, --attention dense, or "
            "--decode-attention dense where the attention has it"
        )
    if (runtime.cache_type_k or runtime.cache_type) == "q8_0":
        raise UsageError(
            "keys of cache type q8_0 would be rounded anew at every eviction of --context-full "
            "evict; use --cache-type-k f16, or --context-full shift"
        )
    refuse_drafts(
        sampling, has_draft=runtime.draft is not None and sampling.draft_tokens != DRAFT_OFF
    )


def require_writing(config: ModelConfig) -> None:
    """Raises UsageError for a model that makes vectors of texts and writes none."""
    if not config.is_causal:
        raise UsageError(
            f"this model ({config.architecture}) makes vectors of texts and writes none: use "
            "'edgeh2o embed', LLM.embed or /v1/embeddings"
        )


def check_request(
    plan: RunPlan, context: int, sampling: SamplingParams, model: LoadedModel, *, has_draft: bool
) -> None:
    """Raises the UsageError that ``Generation`` would, for a runner that is yet to be made.

    One of ``plan``, with room for ``context`` tokens.
    """
    require_writing(plan.config)
    vocab_size = plan.config.vocab_size
    if any(token >= vocab_size for token in sampling.logit_bias or ()):
        raise UsageError(
            "logit_bias (--logit-bias) names a token beyond the vocabulary, whose last is "
            f"{vocab_size - 1}"
        )
    evicts = sampling.context_full == EVICT_WHEN_FULL
    check_length(context, sampling.context_full)
    if evicts:
        check_eviction(model, plan.attention, plan.shape(context))
    if evicts or why_single_tokens(plan.config, plan.device):
        refuse_drafts(sampling, has_draft=has_draft and sampling.draft_tokens != DRAFT_OFF)

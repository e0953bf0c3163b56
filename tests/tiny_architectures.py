"""What tiny models of each architecture have beside the matrices of a llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Tensors and metadata in which an architecture differs.

    Attributes:
        pre_norms, post_norms: the input and the output of a branch are normed.
        qk_norm: "head" or "projection": queries and keys are normed.
        qkv_biases: Q, K and V have biases.
        is_fused: Q, K and V are one matrix, and so are gate and up.
        has_experts: the feed-forward network is a mixture of experts.
        keys: float metadata after the architecture's name. Scales and caps are far from 1 and
            small enough to show in the logits.
    """

    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: str | None = None
    qkv_biases: bool = False
    is_fused: bool = False
    has_experts: bool = False
    keys: Mapping[str, float] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_biases=True),
    "qwen3": Family(qk_norm="head"),
    "qwen3moe": Family(qk_norm="head", has_experts=True),
    "phi3": Family(is_fused=True),
    "granite": Family(
        keys={
            "logit_scale": 4.0,
            "residual_scale": 0.4,
            "embedding_scale": 6.0,
            "attention.scale": 0.35,
        }
    ),
    "olmo2": Family(pre_norms=False, post_norms=True, qk_norm="projection"),
    "gemma2": Family(
        post_norms=True, keys={"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    "gemma3": Family(post_norms=True, qk_norm="head"),
}

"""Architectures ``granite`` and ``granitemoe``: Granite 3 and 4, a llama with four scales.

Logits are divided by their scale. Files whose RoPE is not "finetuned" have no positions at all.
The mixture of experts may have a shared one.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture

SCALES = {
    "attention_scale": "attention.scale",
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
}
DIVISORS = {"logit_scale": "logit_scale"}

for _name, _experts, _feed_forward in (
    ("granite", None, (*blocks.FEED_FORWARD, *blocks.FEED_FORWARD_BIASES)),
    (
        "granitemoe",
        ExpertRule(has_own_width=False, shared="optional"),
        (*blocks.EXPERTS, *blocks.SHARED_EXPERT),
    ),
):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="interleaved",
            rope_factors="rope_freqs.weight",
            rope_switch="rope.scaling.finetuned",
            activation="silu",
            experts=_experts,
            scales=SCALES,
            divisors=DIVISORS,
            tensors=(
                *blocks.EMBEDDINGS,
                *blocks.PRE_NORMS,
                *blocks.ATTENTION,
                *blocks.QKV_BIASES,
                *blocks.ATTENTION_OUTPUT_BIAS,
                *_feed_forward,
            ),
        )
    )

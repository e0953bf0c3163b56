"""Architecture ``granite``: dense Granite 3 and 4, a llama with four scales.

Logits are divided by their scale. Files whose RoPE is not "finetuned" have no positions at all.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="granite",
        qk_row_order="interleaved",
        rope_factors="rope_freqs.weight",
        rope_switch="rope.scaling.finetuned",
        activation="silu",
        scales={
            "attention_scale": "attention.scale",
            "embedding_scale": "embedding_scale",
            "residual_scale": "residual_scale",
        },
        divisors={"logit_scale": "logit_scale"},
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.ATTENTION_OUTPUT_BIAS,
            *blocks.FEED_FORWARD,
            *blocks.FEED_FORWARD_BIASES,
        ),
    )
)

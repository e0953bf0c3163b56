"""Architecture ``olmo``: OLMo 1 and 1.7, a llama with LayerNorm without weights or biases.

Queries, keys and values may have a limit.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="olmo",
        qk_row_order="interleaved",
        norm="layer",
        has_norm_weights=False,
        activation="silu",
        scales={"qkv_limit": "attention.clamp_kqv"},
        tensors=(
            *(rule for rule in blocks.EMBEDDINGS if "norm" not in rule.name),
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)

"""Architecture ``glm4``: GLM-4-0414, with norms before and behind every branch.

Half of every head is rotated; gate and up are one matrix. Files of the vision models, whose rotary
embedding has several axes, have other rows and are refused.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="glm4",
        qk_row_order="interleaved",
        norm_placement="both",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.POST_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.FUSED_FEED_FORWARD,
        ),
    )
)

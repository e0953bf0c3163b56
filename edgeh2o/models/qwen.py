"""Architecture ``qwen``: the first Qwen (1.8B to 72B), whose Q, K and V are one matrix with biases.

Files say the widths of gate and up together as that of the network.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="qwen",
        qk_row_order="half_split",
        activation="silu",
        has_joint_width=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.FUSED_ATTENTION,
            *blocks.FUSED_BIAS,
            *blocks.FEED_FORWARD,
        ),
    )
)

"""Architecture ``maincoder``: Maincoder 1B.

Queries and keys are normed per head after the rotary embedding.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

register_architecture(
    ArchitectureSpec(
        name="maincoder",
        qk_row_order="interleaved",
        qk_norm="head",
        qk_norm_after_rope=True,
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            # Their numbers go with the rows of Q and K.
            tensor("blk.{layer}.attn_q_norm.weight", "head_dim", rotated=True),
            tensor("blk.{layer}.attn_k_norm.weight", "head_dim", rotated=True),
            *blocks.FEED_FORWARD,
        ),
    )
)

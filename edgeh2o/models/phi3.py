"""Architecture ``phi3``: Phi 3, 3.5 and 4.

Q, K and V are one matrix, and so are gate and up. Some models rotate only part of a head, some
bring LongRoPE tables, and some have a window in every layer (a width of 0 says that there is
none).
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="phi3",
        qk_row_order="half_split",
        activation="silu",
        long_rope_factors=("rope_factors_short.weight", "rope_factors_long.weight"),
        windows=SlidingWindows(),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.FUSED_ATTENTION,
            *blocks.FUSED_FEED_FORWARD,
        ),
    )
)

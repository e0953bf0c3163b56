"""Architecture ``olmo2``: OLMo 2 and 3.

The output of every branch is normed instead of its input, and queries and keys over the whole
projection. OLMo 3 has windows in three layers of four; its RoPE scaling is for the fourth only.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="olmo2",
        qk_row_order="half_split",
        norm_placement="post",
        qk_norm="projection",
        activation="silu",
        windows=SlidingWindows(full_every=4, has_plain_rope=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.POST_NORMS,
            *blocks.ATTENTION,
            *blocks.PROJECTION_NORMS,
            *blocks.FEED_FORWARD,
        ),
    )
)

"""Architecture ``gemma-embedding``: EmbeddingGemma, Gemma 3 whose tokens read those behind them.

Five layers of six have a window to both sides, and a RoPE base of their own. Vectors are means of
tokens, which may go through two more matrices.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="gemma-embedding",
        qk_row_order="half_split",
        is_causal=False,
        norm_placement="both",
        qk_norm="head",
        activation="gelu_tanh",
        windows=SlidingWindows(
            full_every=6,
            is_width_required=True,
            is_symmetric=True,
            rope_base=10000.0,
            has_plain_rope=True,
        ),
        scales_embedding_by_width=True,
        has_dense_modules=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.POST_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            *blocks.FEED_FORWARD,
        ),
    )
)

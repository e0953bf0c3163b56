"""Architecture ``minicpm3``: MiniCPM 3, latent attention and the scales of MiniCPM.

Files do not say the scales, which are those of the one model there is.
"""

from __future__ import annotations

from . import blocks
from .latent import LatentRule
from .spec import ArchitectureSpec, DepthScales, register_architecture

register_architecture(
    ArchitectureSpec(
        name="minicpm3",
        qk_row_order="half_split",
        activation="silu",
        latent=LatentRule(has_lengths=False),
        long_rope_factors=("rope_factors_short.weight", "rope_factors_long.weight"),
        depth_scales=DepthScales(embedding=12.0, depth=1.4, base_width=256),
        tensors=(*blocks.EMBEDDINGS, *blocks.PRE_NORMS, *blocks.FEED_FORWARD),
    )
)

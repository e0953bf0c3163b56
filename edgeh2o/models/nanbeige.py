"""Architecture ``nanbeige``: a llama whose layers may be gone through several times.

Files that do so (Nanbeige 4.2) are refused by their key ``num_loops``.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="nanbeige",
        qk_row_order="interleaved",
        rope_factors="rope_freqs.weight",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)

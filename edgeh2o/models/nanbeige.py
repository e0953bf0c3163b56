"""Architecture ``nanbeige``: a llama whose layers may be gone through several times.

Files say how often (Nanbeige 4.2), and whether the residual stream is normed in between, by
the norm of the output.
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
        has_loops=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)

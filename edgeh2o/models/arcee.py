"""Architecture ``arcee``: AFM-4.5B, a llama whose feed-forward networks have no gate.

Between their two matrices is the square of ReLU.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="arcee",
        qk_row_order="interleaved",
        rope_factors="rope_freqs.weight",
        activation="relu_squared",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.UNGATED_FEED_FORWARD,
        ),
    )
)

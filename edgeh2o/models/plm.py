"""Architecture ``plm``: PLM-1.8B, latent attention and networks without a gate.

Between the two matrices of a network is the square of ReLU, as in ``arcee``.
"""

from __future__ import annotations

from . import blocks
from .latent import LatentRule
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="plm",
        qk_row_order="interleaved",
        activation="relu_squared",
        latent=LatentRule(has_lengths=False),
        tensors=(*blocks.EMBEDDINGS, *blocks.PRE_NORMS, *blocks.UNGATED_FEED_FORWARD),
    )
)

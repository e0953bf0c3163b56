"""Architecture ``graniteswitch``: Granite Switch 4.1 (3B, 8B, 30B), a dense Granite with adapters.

Files hold adapters of all matrices of every layer. Each has a token of its own in the vocabulary:
from that on it counts, and the token is read as another (``own_adapters.py``).
"""

from __future__ import annotations

from . import blocks
from .granite import DIVISORS, SCALES
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="graniteswitch",
        qk_row_order="interleaved",
        rope_switch="rope.scaling.finetuned",
        activation="silu",
        scales=SCALES,
        divisors=DIVISORS,
        required_scales=("logit_scale",),
        chooses_adapters=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.FUSED_ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)

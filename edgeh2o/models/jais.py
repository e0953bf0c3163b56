"""Architecture ``jais``: Jais 13B and 30B and the Jais family, with a bias by distance (ALiBi).

LayerNorm and biases everywhere, networks with a SiLU gate. Attention logits are divided by the head
size, not by its root; what else the model multiplies is in its converted weights.
"""

from __future__ import annotations

from . import blocks
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="jais",
        qk_row_order="half_split",
        norm="layer",
        activation="silu",
        rope=RopeRule(none_every=1),
        alibi_key="required",
        scales_by_head_dim=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.required(blocks.NORM_BIASES),
            *blocks.FUSED_ATTENTION,
            *blocks.FUSED_BIAS,
            *blocks.required(blocks.ATTENTION_OUTPUT_BIAS),
            *blocks.FEED_FORWARD,
            *blocks.required(blocks.FEED_FORWARD_BIASES),
        ),
    )
)

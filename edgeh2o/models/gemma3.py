"""Architecture ``gemma3``: text part of Gemma 3, with a window in five layers of six.

Layers with a window have a RoPE base of their own and no RoPE scaling. Converters have added the
1 of Gemma's norm weights. The 27B model, known by its 62 layers, has another scale of attention
logits.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="gemma3",
        qk_row_order="half_split",
        norm_placement="both",
        qk_norm="head",
        activation="gelu_tanh",
        windows=SlidingWindows(full_every=6, rope_base=10000.0, has_plain_rope=True),
        scales={"logit_soft_cap": "final_logit_softcapping"},
        scales_embedding_by_width=True,
        n_layers_scaled_by_width=62,
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

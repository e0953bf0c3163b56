"""Architecture ``gemma2``: soft caps of attention and output logits, a window in every other layer.

Converters have added the 1 of Gemma's norm weights. The 27B model, known by its 46 layers, has
another scale of attention logits.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="gemma2",
        qk_row_order="half_split",
        norm_placement="both",
        activation="gelu_tanh",
        windows=SlidingWindows(full_every=2, default=4096),
        scales={
            "attention_soft_cap": "attn_logit_softcapping",
            "logit_soft_cap": "final_logit_softcapping",
        },
        default_soft_caps={"attention_soft_cap": 50.0, "logit_soft_cap": 30.0},
        scales_embedding_by_width=True,
        n_layers_scaled_by_width=46,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.POST_NORMS,
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)

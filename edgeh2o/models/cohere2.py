"""Architecture ``cohere2``: Command R7B, attention and networks side by side behind one LayerNorm.

Three of four layers have a window and a rotary embedding, the fourth neither. The embedding is the
output too, and logits have a scale.
"""

from __future__ import annotations

from . import blocks
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="cohere2",
        qk_row_order="interleaved",
        norm="layer",
        is_parallel=True,
        activation="silu",
        rope=RopeRule(only_windows=True),
        windows=SlidingWindows(full_every=4, default=4096),
        scales={"logit_scale": "logit_scale"},
        required_scales=("logit_scale",),
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("blk.{layer}.attn_norm.weight", "model_dim"),
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)

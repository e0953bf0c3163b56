"""Architecture ``plamo3``: PLaMo 3, with a window in seven layers of eight.

As ``gemma3`` with SiLU: branches are normed at both ends, queries and keys per head, and layers
with a window have a RoPE base of their own. Files have one matrix of Q, K and V and one of gate and
up, and norms behind branches without the end of their names.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="plamo3",
        qk_row_order="half_split",
        norm_placement="both",
        qk_norm="head",
        activation="silu",
        windows=SlidingWindows(full_every=8, rope_base=10000.0, has_plain_rope=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *(
                tensor(name, "model_dim", core_name=f"{name}.weight")
                for name in (
                    "blk.{layer}.post_attention_norm",
                    "blk.{layer}.post_ffw_norm",
                )
            ),
            *blocks.FUSED_ATTENTION,
            *blocks.HEAD_NORMS,
            *blocks.FUSED_FEED_FORWARD,
        ),
    )
)

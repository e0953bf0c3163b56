"""Architecture ``mamba2``: Mamba-2 and Codestral Mamba, layers of Mamba-2 alone.

No layer attends, and none has a feed-forward network.
"""

from __future__ import annotations

from . import blocks
from .hybrids import HybridRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

register_architecture(
    ArchitectureSpec(
        name="mamba2",
        qk_row_order="half_split",
        rope=RopeRule(none_every=1),
        activation="silu",
        hybrid=HybridRule(mixer="mamba2", has_attention=False),
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("blk.{layer}.attn_norm.weight", "model_dim"),
            *blocks.MAMBA2,
            blocks.MAMBA2_NORM,
        ),
    )
)

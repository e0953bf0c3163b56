"""Architecture ``mamba``: Mamba and Falcon-Mamba, layers of Mamba-1 alone.

No layer attends, and none has a feed-forward network. Files of Falcon-Mamba say that what it
selects by is normed, without weights.
"""

from __future__ import annotations

from . import blocks
from .hybrids import HybridRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

register_architecture(
    ArchitectureSpec(
        name="mamba",
        qk_row_order="half_split",
        rope=RopeRule(none_every=1),
        activation="silu",
        hybrid=HybridRule(mixer="mamba1", has_attention=False, has_norms=False),
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("blk.{layer}.attn_norm.weight", "model_dim"),
            *blocks.MAMBA1,
        ),
    )
)

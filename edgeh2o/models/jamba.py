"""Architecture ``jamba``: Mamba-1 between layers with attention, which has no positions.

Layers without KV heads have Mamba-1 (Gu and Dao 2023), with norms of what steps are made of, of
what writes to the state and of what reads it. Some layers may be mixtures of experts, whose shares
do not add up to 1.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .hybrids import HybridRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of

register_architecture(
    ArchitectureSpec(
        name="jamba",
        qk_row_order="half_split",
        rope=RopeRule(none_every=1),
        activation="silu",
        hybrid=HybridRule(mixer="mamba1"),
        experts=ExpertRule(
            has_own_width=False, is_normalised=False, is_optional=True, goes_by_tensors=True
        ),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *tensors_of("mamba1", (*blocks.MAMBA1, *blocks.MAMBA1_NORMS)),
            *tensors_of("attention", blocks.ATTENTION),
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", blocks.EXPERTS),
        ),
    )
)

"""Architectures ``exaone`` (3 and 3.5) and ``exaone4``.

EXAONE 4 norms the output of every branch instead of its input, and queries and keys per head. Its
32B model, known by its 64 layers, has windows in three layers of four, and no positions in the
fourth.
"""

from __future__ import annotations

from . import blocks
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="exaone",
        qk_row_order="half_split",
        rope_factors="rope_freqs.weight",
        activation="silu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)
register_architecture(
    ArchitectureSpec(
        name="exaone4",
        qk_row_order="half_split",
        rope=RopeRule(only_windows=True),
        rope_factors="rope_freqs.weight",
        norm_placement="post",
        qk_norm="head",
        activation="silu",
        windows=SlidingWindows(full_every=4, default=4096, n_layers_by_default=64),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.POST_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            *blocks.FEED_FORWARD,
        ),
    )
)

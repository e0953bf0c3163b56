"""Architectures ``baichuan`` (Baichuan and Baichuan 2) and ``xverse``: llamas by other names.

Baichuan 13B, known by its 40 layers, has a bias by distance (ALiBi) in the place of a rotary
embedding.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

for _name, _depth in (("baichuan", 40), ("xverse", None)):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="interleaved",
            activation="silu",
            max_alibi_bias=8.0 if _depth else 0.0,
            alibi_depth=_depth,
            tensors=(
                *blocks.EMBEDDINGS,
                *blocks.PRE_NORMS,
                *blocks.ATTENTION,
                *blocks.FEED_FORWARD,
            ),
        )
    )

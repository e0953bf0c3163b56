"""Architectures ``baichuan`` (Baichuan and Baichuan 2, 7B) and ``xverse``: llamas by other names.

Baichuan 13B, known by its 40 layers, has ALiBi in the place of a rotary embedding and is refused.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

for _name, _refused in (("baichuan", {40: "positions by ALiBi"}), ("xverse", {})):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="interleaved",
            activation="silu",
            refused_depths=_refused,
            tensors=(
                *blocks.EMBEDDINGS,
                *blocks.PRE_NORMS,
                *blocks.ATTENTION,
                *blocks.FEED_FORWARD,
            ),
        )
    )

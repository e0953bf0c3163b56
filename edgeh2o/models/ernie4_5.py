"""Architectures ``ernie4_5`` and ``ernie4_5-moe``: ERNIE 4.5, a llama by another name.

All but the first layers of the latter are mixtures of experts. Shares are a softmax; biases, where
a file has them, count in the choice alone.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of

_LLAMA = (*blocks.EMBEDDINGS, *blocks.PRE_NORMS, *blocks.ATTENTION)

register_architecture(
    ArchitectureSpec(
        name="ernie4_5",
        qk_row_order="interleaved",
        activation="silu",
        tensors=(*_LLAMA, *blocks.FEED_FORWARD),
    )
)
register_architecture(
    ArchitectureSpec(
        name="ernie4_5-moe",
        qk_row_order="interleaved",
        activation="silu",
        experts=ExpertRule(shared="optional", has_bias="optional", has_dense_layers=True),
        tensors=(
            *_LLAMA,
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", (*blocks.EXPERTS, *blocks.SHARED_EXPERT, *blocks.CHOICE_BIASES)),
        ),
    )
)

"""Architectures ``deepseek`` (DeepSeekMoE 16B, GigaChat 20B-A3B) and ``dots1`` (dots.llm1).

All but the first layers are mixtures of experts with a shared one, as wide as several. Shares of
``deepseek`` are those of a softmax over all experts; ``dots1`` chooses as ``deepseek2`` does, and
norms queries and keys per head.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of

_LLAMA = (*blocks.EMBEDDINGS, *blocks.PRE_NORMS, *blocks.ATTENTION)
_DENSE = tensors_of("dense", blocks.FEED_FORWARD)
_EXPERTS = (*blocks.EXPERTS, *blocks.SHARED_EXPERT)

register_architecture(
    ArchitectureSpec(
        name="deepseek",
        qk_row_order="interleaved",
        activation="silu",
        experts=ExpertRule(shared="count", has_dense_layers=True, has_scales=True),
        tensors=(*_LLAMA, *_DENSE, *tensors_of("experts", _EXPERTS)),
    )
)
register_architecture(
    ArchitectureSpec(
        name="dots1",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        experts=ExpertRule(
            shared="count",
            gate="file",
            has_bias="optional",
            has_dense_layers=True,
            has_scales=True,
        ),
        tensors=(
            *_LLAMA,
            *blocks.HEAD_NORMS,
            *_DENSE,
            *tensors_of("experts", (*_EXPERTS, *blocks.CHOICE_BIASES)),
        ),
    )
)

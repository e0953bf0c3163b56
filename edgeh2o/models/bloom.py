"""Architecture ``bloom``: BLOOM and BLOOMZ (560M to 176B), with a bias by distance (ALiBi).

LayerNorm and biases everywhere, also behind the embedding; networks have a GELU and no gate.
"""

from __future__ import annotations

from . import blocks
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

register_architecture(
    ArchitectureSpec(
        name="bloom",
        qk_row_order="half_split",
        norm="layer",
        has_embedding_norm=True,
        activation="ungated_gelu",
        rope=RopeRule(none_every=1),
        max_alibi_bias=8.0,
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("token_embd_norm.weight", "model_dim"),
            tensor("token_embd_norm.bias", "model_dim"),
            *blocks.PRE_NORMS,
            *blocks.required(blocks.NORM_BIASES),
            *blocks.FUSED_ATTENTION,
            *blocks.FUSED_BIAS,
            *blocks.required(blocks.ATTENTION_OUTPUT_BIAS),
            *blocks.UNGATED_FEED_FORWARD,
            *blocks.required(blocks.UNGATED_FEED_FORWARD_BIASES),
        ),
    )
)

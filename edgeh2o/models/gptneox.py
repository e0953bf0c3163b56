"""Architecture ``gptneox``: GPT-NeoX, Pythia and Dolly, with LayerNorm and biases everywhere.

Files say whether attention and the network are side by side, each behind a norm of its own. Heads
are rotated in part, and networks have a GELU and no gate.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="gptneox",
        qk_row_order="half_split",
        norm="layer",
        has_parallel_norm=True,
        parallel_switch="use_parallel_residual",
        activation="ungated_gelu",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.FUSED_ATTENTION,
            *blocks.FUSED_BIAS,
            *blocks.UNGATED_FEED_FORWARD,
            *blocks.required(blocks.NORM_BIASES),
            *blocks.required(blocks.ATTENTION_OUTPUT_BIAS),
            *blocks.required(blocks.UNGATED_FEED_FORWARD_BIASES),
        ),
    )
)

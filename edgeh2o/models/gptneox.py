"""Architecture ``gptneox``: GPT-NeoX, Pythia and Dolly, with LayerNorm and biases everywhere.

Files say whether attention and the network are side by side, each behind a norm of its own. Heads
are rotated in part, and networks have a GELU and no gate.
"""

from __future__ import annotations

from dataclasses import replace

from . import blocks
from .spec import ArchitectureSpec, register_architecture

_BIASES = (
    *blocks.NORM_BIASES,
    *blocks.ATTENTION_OUTPUT_BIAS,
    *(rule for rule in blocks.FEED_FORWARD_BIASES if "gate" not in rule.name),
)

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
            *(replace(rule, required=True) for rule in _BIASES),
        ),
    )
)

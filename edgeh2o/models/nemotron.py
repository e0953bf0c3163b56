"""Architectures ``nemotron`` (Nemotron Mini, Minitron) and ``jais2`` (Jais 2).

LayerNorm with biases; networks have no gate, but the square of ReLU. Heads of ``nemotron`` are
rotated in part, and converters have added the 1 of its norm weights. Everything in ``jais2`` has
biases.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture

_BIASES = (
    *blocks.QKV_BIASES,
    *blocks.ATTENTION_OUTPUT_BIAS,
    *blocks.UNGATED_FEED_FORWARD_BIASES,
)

for _name, _biases in (("nemotron", _BIASES), ("jais2", blocks.required(_BIASES))):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="half_split",
            norm="layer",
            activation="relu_squared",
            tensors=(
                *blocks.EMBEDDINGS,
                *blocks.PRE_NORMS,
                *blocks.required(blocks.NORM_BIASES),
                *blocks.ATTENTION,
                *blocks.UNGATED_FEED_FORWARD,
                *_biases,
            ),
        )
    )

"""Architecture ``muse-glimmer``: Muse Glimmer 30B (texts), dense, with gates of attention.

As ``afmoe`` without experts: inputs and outputs of branches are normed, and layers without a window
have no positions. Embeddings are normed too, and norms of outputs have an epsilon of their own.
"""

from __future__ import annotations

from dataclasses import replace

from . import blocks
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="muse-glimmer",
        qk_row_order="interleaved",
        norm_placement="both",
        norms_embeddings=True,
        post_norm_eps=1e-8,
        qk_norm="head",
        activation="silu",
        rope=RopeRule(only_windows=True),
        windows=SlidingWindows(is_required=True),
        output_gate="per_output",
        scales={"logit_scale": "logit_scale", "logit_soft_cap": "final_logit_softcapping"},
        required_scales=("logit_scale",),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.POST_NORMS,
            *blocks.ATTENTION,
            *(replace(rule, rotated=True) for rule in blocks.HEAD_NORMS),
            tensor("blk.{layer}.attn_gate.weight", "model_dim", "q_dim"),
            *blocks.FEED_FORWARD,
        ),
    )
)

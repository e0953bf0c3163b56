"""Architectures ``command-r`` and ``cohere2``: attention and networks side by side.

Both have the same input, behind one LayerNorm. The embedding is the output too, and logits have a
scale. In ``cohere2`` (Command R7B) three of four layers have a window and a rotary embedding, the
fourth neither. Command R+, which norms queries and keys, is refused by the names of these norms.
"""

from __future__ import annotations

from . import blocks
from .rope import PLAIN_ROPE, RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor
from .windows import SlidingWindows

for _name, _rope, _windows in (
    ("command-r", PLAIN_ROPE, None),
    ("cohere2", RopeRule(only_windows=True), SlidingWindows(full_every=4, default=4096)),
):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="interleaved",
            norm="layer",
            is_parallel=True,
            activation="silu",
            rope=_rope,
            windows=_windows,
            scales={"logit_scale": "logit_scale"},
            required_scales=("logit_scale",),
            tensors=(
                *blocks.EMBEDDINGS,
                tensor("blk.{layer}.attn_norm.weight", "model_dim"),
                *blocks.SHARED_NORM_BIASES,
                *blocks.ATTENTION,
                *blocks.QKV_BIASES,
                *blocks.ATTENTION_OUTPUT_BIAS,
                *blocks.FEED_FORWARD,
                *blocks.FEED_FORWARD_BIASES,
            ),
        )
    )

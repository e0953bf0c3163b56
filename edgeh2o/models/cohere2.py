"""Architectures ``command-r``, ``cohere2`` and ``cohere2moe``: attention and networks side by side.

Both have the same input, behind one LayerNorm. The embedding is the output too, and logits have a
scale. In ``cohere2`` (Command R7B) three of four layers have a window and a rotary embedding, the
fourth neither. In ``cohere2moe`` all but the first layers are mixtures of experts, whose sum with
the shared one is halved; the first layers have positions whether they have a window or not. Layers
that guess tokens ahead (MTP) are left out. Command R+, which norms queries and keys, is refused by
the names of these norms.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .rope import PLAIN_ROPE, RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of
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


# Gate and up of experts are one matrix or two.
_ROUTER, _GATE, _UP, _DOWN = blocks.EXPERTS
_EXPERTS = (_ROUTER, *blocks.optional((_GATE, _UP, blocks.FUSED_EXPERTS[0])), _DOWN)

register_architecture(
    ArchitectureSpec(
        name="cohere2moe",
        qk_row_order="interleaved",
        norm="layer",
        is_parallel=True,
        activation="silu",
        rope=RopeRule(only_windows=True, has_dense=True),
        windows=SlidingWindows(full_every=4, is_full_first=True, default=4096),
        experts=ExpertRule(
            shared="count",
            gate="sigmoid",
            says_gate=False,
            has_dense_layers=True,
            has_scales=True,
            halves_shared=True,
        ),
        has_drafting_layers=True,
        scales={"logit_scale": "logit_scale"},
        required_scales=("logit_scale",),
        tensors=(
            *blocks.EMBEDDINGS,
            tensor("blk.{layer}.attn_norm.weight", "model_dim"),
            *blocks.ATTENTION,
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", (*_EXPERTS, *blocks.SHARED_EXPERT)),
        ),
    )
)

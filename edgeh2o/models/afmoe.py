"""Architectures ``afmoe``, ``laguna`` and ``spark2_5``: attention with gates of its output.

``afmoe`` (Trinity Nano and Mini) and ``laguna`` are mixtures of experts behind dense first layers,
chosen as in ``deepseek2``. In ``afmoe`` inputs and outputs of branches are normed, and layers
without a window have no positions. Heads have one gate each in ``laguna`` and ``spark2_5``, whose
files say how much of them is rotated in layers with a window.
"""

from __future__ import annotations

from dataclasses import replace

from . import blocks
from .experts import BIASED_RULE
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import TensorRule, tensor
from .windows import SlidingWindows


def _gate(size: str) -> TensorRule:
    return tensor("blk.{layer}.attn_gate.weight", "model_dim", size)


register_architecture(
    ArchitectureSpec(
        name="afmoe",
        qk_row_order="half_split",
        norm_placement="both",
        qk_norm="head",
        activation="silu",
        rope=RopeRule(none_every=4, only_windows=True),
        windows=SlidingWindows(full_every=4),
        experts=BIASED_RULE,
        scales_embedding_by_width=True,
        output_gate="per_output",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.POST_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            _gate("q_dim"),
            *blocks.BIASED_EXPERTS,
        ),
    )
)
register_architecture(
    ArchitectureSpec(
        name="laguna",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        windows=SlidingWindows(
            full_every=4, is_full_first=True, has_plain_rope=True, has_own_rotary_dim=True
        ),
        experts=replace(BIASED_RULE, shared="required"),
        output_gate="per_head",
        head_gate="softplus",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            _gate("n_heads"),
            *blocks.BIASED_EXPERTS,
        ),
    )
)

_SPARK = (*blocks.EMBEDDINGS, *blocks.PRE_NORMS, _gate("n_heads"), *blocks.FEED_FORWARD)

register_architecture(
    ArchitectureSpec(
        name="spark2_5",
        qk_row_order="half_split",
        activation="gelu_tanh",
        windows=SlidingWindows(is_required=True, has_own_rotary_dim=True),
        output_gate="per_head",
        tensors=(*_SPARK, *blocks.ATTENTION),
        fused_tensors=(*_SPARK, *blocks.FUSED_ATTENTION),
    )
)

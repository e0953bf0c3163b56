"""Architectures ``hunyuan-dense``, ``hunyuan_vl``, ``hunyuan-moe`` and ``hy_v3``.

Hunyuan 0.5B to 7B, HunyuanOCR and Hunyuan VL (texts), Hunyuan A13B, and Hy3. Queries and keys are
normed per head, in all but the last after the rotary embedding. The mixtures of experts have a
shared one; those of ``hy_v3`` are chosen as in ``deepseek2`` and lie behind dense first layers, and
files may have a layer that guesses tokens ahead (MTP).
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .rope import PLAIN_ROPE, RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of

_ATTENTION = (
    *blocks.EMBEDDINGS,
    *blocks.PRE_NORMS,
    *blocks.ATTENTION,
    *blocks.HEAD_NORMS,
)
# The converter leaves out the end of their name.
_CHOICE_BIASES = (
    tensor(
        "blk.{layer}.exp_probs_b",
        "n_experts",
        required=False,
        core_name="blk.{layer}.exp_probs_b.bias",
    ),
)
_EXPERTS = (*blocks.EXPERTS, *blocks.required(blocks.SHARED_EXPERT))

for _name, _rope, _experts, _feed_forward in (
    ("hunyuan-dense", PLAIN_ROPE, None, blocks.FEED_FORWARD),
    ("hunyuan_vl", RopeRule(is_extended=True), None, blocks.FEED_FORWARD),
    ("hunyuan-moe", PLAIN_ROPE, ExpertRule(shared="required"), _EXPERTS),
):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="half_split",
            qk_norm="head",
            qk_norm_after_rope=True,
            activation="silu",
            rope=_rope,
            experts=_experts,
            tensors=(*_ATTENTION, *_feed_forward),
        )
    )
register_architecture(
    ArchitectureSpec(
        name="hy_v3",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        experts=ExpertRule(
            shared="required",
            gate="sigmoid",
            says_gate=False,
            has_bias="optional",
            has_dense_layers=True,
            has_scales=True,
        ),
        has_drafting_layers=True,
        can_draft=True,
        tensors=(
            *_ATTENTION,
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", (*_EXPERTS, *_CHOICE_BIASES)),
        ),
    )
)

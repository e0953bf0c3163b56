"""Architecture ``step35``: Step-3.5-Flash (196B-A11B), a mixture of experts with windows.

Files say which layers have a window; these have other numbers of heads, a RoPE base of their own,
and rotate heads whole, where the others rotate a half. Queries and keys are normed per head, and
heads have a gate each. Experts are chosen as in ``deepseek2``, and what comes out of activations
may have a limit, another one in the shared expert and in networks of the first layers. Layers that
guess tokens ahead (MTP), of which there are three, are left out.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="step35",
        qk_row_order="half_split",
        qk_norm="head",
        has_optional_qk_norm=True,
        activation="silu",
        windows=SlidingWindows(
            is_required=True,
            has_own_rotary_dim=True,
            halves_full_rotary=True,
            rope_base=10000.0,
            has_plain_rope=True,
        ),
        rope_factors="rope_freqs.weight",
        experts=ExpertRule(
            shared="optional",
            gate="sigmoid",
            says_gate=False,
            has_bias="optional",
            has_dense_layers=True,
            has_scales=True,
            has_output_limits=True,
        ),
        has_drafting_layers=True,
        output_gate="per_head",
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.optional(blocks.HEAD_NORMS),
            tensor("blk.{layer}.attn_gate.weight", "model_dim", "n_heads"),
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", (*blocks.EXPERTS, *blocks.SHARED_EXPERT, *blocks.CHOICE_BIASES)),
        ),
    )
)

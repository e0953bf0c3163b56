"""Architecture ``granite_swa``: Granite with windows, dense and mixtures of experts.

Heads have sinks. Files say which layers have a window, and may say which have positions. Gate and
up of experts are one matrix, and so are those of the shared expert.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .granite import DIVISORS, SCALES
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import TensorPart, tensor, tensors_of
from .windows import SlidingWindows

_EXPERTS = (
    tensor("blk.{layer}.ffn_gate_inp.weight", "model_dim", "n_experts"),
    *blocks.FUSED_EXPERTS,
    tensor(
        "blk.{layer}.ffn_up_shexp.weight",
        "model_dim",
        "shared_gate_up_dim",
        required=False,
        parts=(
            TensorPart("blk.{layer}.ffn_gate_shexp.weight", "shared_ffn_dim"),
            TensorPart("blk.{layer}.ffn_up_shexp.weight", "shared_ffn_dim"),
        ),
    ),
    tensor("blk.{layer}.ffn_down_shexp.weight", "shared_ffn_dim", "model_dim", required=False),
)

register_architecture(
    ArchitectureSpec(
        name="granite_swa",
        qk_row_order="interleaved",
        rope=RopeRule(has_pattern=True),
        rope_factors="rope_freqs.weight",
        activation="silu",
        windows=SlidingWindows(is_required=True),
        experts=ExpertRule(has_own_width=False, shared="optional", is_optional=True),
        scales=SCALES,
        divisors=DIVISORS,
        required_scales=("logit_scale",),
        has_sinks=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.ATTENTION_OUTPUT_BIAS,
            tensor("blk.{layer}.attn_sinks.weight", "n_heads"),
            *tensors_of("dense", (*blocks.FEED_FORWARD, *blocks.FEED_FORWARD_BIASES)),
            *tensors_of("experts", _EXPERTS),
        ),
    )
)

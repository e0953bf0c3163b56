"""Architectures ``lfm2`` and ``lfm2moe``: short convolutions between layers with attention.

Layers without KV heads have a convolution of a few tokens between two gates. In ``lfm2moe`` all
but the first layers are mixtures of experts, whose shares are sigmoids; a bias counts in the
choice of experts. The norm of the output goes by the name of a norm of embeddings.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .hybrids import HybridRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of
from .windows import SlidingWindows

_TENSORS = (
    tensor("token_embd.weight", "model_dim", "vocab_size"),
    tensor("token_embd_norm.weight", "model_dim", core_name="output_norm.weight"),
    tensor("output.weight", "model_dim", "vocab_size", required=False),
    *blocks.PRE_NORMS,
    *tensors_of("attention", blocks.ATTENTION),
    *tensors_of("attention", blocks.HEAD_NORMS),
    *tensors_of(
        "short_conv",
        (
            tensor("blk.{layer}.shortconv.in_proj.weight", "model_dim", "conv_in_dim"),
            tensor(
                "blk.{layer}.shortconv.conv.weight", "n_conv_taps", "model_dim", is_vectors=True
            ),
            tensor("blk.{layer}.shortconv.out_proj.weight", "model_dim", "model_dim"),
        ),
    ),
)

register_architecture(
    ArchitectureSpec(
        name="lfm2",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        windows=SlidingWindows(),
        hybrid=HybridRule(mixer="short_conv"),
        tensors=(*_TENSORS, *blocks.FEED_FORWARD),
    )
)
register_architecture(
    ArchitectureSpec(
        name="lfm2moe",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        hybrid=HybridRule(mixer="short_conv"),
        experts=ExpertRule(gate="sigmoid", has_bias=True, has_dense_layers=True),
        tensors=(
            *_TENSORS,
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", blocks.EXPERTS),
            tensor("blk.{layer}.exp_probs_b.bias", "n_experts", of="experts"),
        ),
    )
)

"""Architecture ``deci``: DeciLM 7B and Llama Nemotron Super 49B, llamas whose layers differ.

Layers have their own numbers of KV heads and widths, and some have no attention. Those of Nemotron
51B whose attention is one matrix, without heads, are refused.
"""

from __future__ import annotations

from . import blocks
from .hybrids import HybridRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of

register_architecture(
    ArchitectureSpec(
        name="deci",
        qk_row_order="interleaved",
        rope_factors="rope_freqs.weight",
        activation="silu",
        hybrid=HybridRule(mixer="none"),
        scales={"attention_scale": "attention.scale"},
        tensors=(
            *blocks.EMBEDDINGS,
            *tensors_of(
                "attention",
                (
                    tensor("blk.{layer}.attn_norm.weight", "model_dim"),
                    *blocks.ATTENTION,
                    *blocks.QKV_BIASES,
                    *blocks.ATTENTION_OUTPUT_BIAS,
                ),
            ),
            tensor("blk.{layer}.ffn_norm.weight", "model_dim"),
            *blocks.FEED_FORWARD,
            *blocks.FEED_FORWARD_BIASES,
        ),
    )
)

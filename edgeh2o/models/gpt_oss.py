"""Architecture ``gpt-oss``: a mixture of experts with attention sinks and biases everywhere.

Every other layer has a window. The norm of the experts' input goes by the name of a norm behind
attention. Weights of a token's experts are a softmax over their logits alone, which is the softmax
over all of them divided by its sum. Frequencies are those of the original model, whose YaRN is not
rounded to whole pairs as llama.cpp's is.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="gpt-oss",
        qk_row_order="half_split",
        activation="silu_clamped",
        experts=ExpertRule(),
        windows=SlidingWindows(full_every=2),
        rope=RopeRule(rounds_yarn=False),
        has_sinks=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.RENAMED_PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.QKV_BIASES,
            *blocks.ATTENTION_OUTPUT_BIAS,
            tensor("blk.{layer}.attn_sinks.weight", "n_heads"),
            *blocks.EXPERTS,
            tensor("blk.{layer}.ffn_gate_inp.bias", "n_experts"),
            *blocks.EXPERT_BIASES,
        ),
    )
)

"""Architecture ``granitehybrid``: Granite 4.0 H and Bamba, Mamba-2 between layers with attention.

Layers without KV heads have Mamba-2 (Dao and Gu 2024). The scales are those of ``granite``, and
files whose RoPE is not "finetuned" have no positions; Granite 4.0 H has none. Some are mixtures of
experts with a shared one.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .granite import DIVISORS, SCALES
from .hybrids import HybridRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of

register_architecture(
    ArchitectureSpec(
        name="granitehybrid",
        qk_row_order="interleaved",
        rope_factors="rope_freqs.weight",
        rope_switch="rope.scaling.finetuned",
        activation="silu",
        hybrid=HybridRule(mixer="mamba2"),
        experts=ExpertRule(has_own_width=False, shared="optional", is_optional=True),
        scales=SCALES,
        divisors=DIVISORS,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *tensors_of("mamba2", (*blocks.MAMBA2, blocks.MAMBA2_NORM)),
            *tensors_of(
                "attention",
                (*blocks.ATTENTION, *blocks.QKV_BIASES, *blocks.ATTENTION_OUTPUT_BIAS),
            ),
            *tensors_of("dense", (*blocks.FEED_FORWARD, *blocks.FEED_FORWARD_BIASES)),
            *tensors_of("experts", (*blocks.EXPERTS, *blocks.SHARED_EXPERT)),
        ),
    )
)

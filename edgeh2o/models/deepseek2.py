"""Architecture ``deepseek2``: DeepSeek V2 and V3, and what others made after them.

Multi-head latent attention: the cache holds one row per token and layer, of which the keys and
values of all heads are products. All but the first layers are mixtures of experts, which files
without any leave out (Youtu-LLM). YaRN scales the logits of attention, not queries and keys. Layers
that guess tokens ahead (MTP) are left out.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .latent import LatentRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensors_of

register_architecture(
    ArchitectureSpec(
        name="deepseek2",
        qk_row_order="interleaved",
        activation="silu",
        rope=RopeRule(has_log_multiplier=True, scales_logits=True),
        latent=LatentRule(),
        experts=ExpertRule(
            shared="count",
            gate="file",
            has_bias="optional",
            has_dense_layers=True,
            has_scales=True,
            is_optional=True,
        ),
        has_drafting_layers=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *tensors_of("dense", blocks.FEED_FORWARD),
            *tensors_of("experts", (*blocks.EXPERTS, *blocks.SHARED_EXPERT, *blocks.CHOICE_BIASES)),
        ),
    )
)

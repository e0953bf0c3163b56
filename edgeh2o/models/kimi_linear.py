"""Architecture ``kimi-linear``: Kimi Linear 48B-A3B.

Most layers have a delta net whose rows decay by themselves (Kimi Delta Attention), with a
convolution before queries, keys and values each; the others have latent attention without
positions: what other models rotate is left as it is. Experts are chosen as in ``deepseek2``.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .hybrids import HybridRule
from .latent import LatentRule
from .rope import RopeRule
from .row_decay_tensors import row_decay_tensors
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="kimi-linear",
        qk_row_order="half_split",
        activation="silu",
        rope=RopeRule(none_every=1),
        latent=LatentRule(),
        hybrid=HybridRule(mixer="delta_net", row_decays="unbounded"),
        experts=ExpertRule(
            shared="count",
            gate="sigmoid",
            has_bias=True,
            has_dense_layers=True,
            has_scales=True,
            normalises_by_default=True,
        ),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *row_decay_tensors(has_vectors=True),
            *blocks.BIASED_EXPERTS,
        ),
    )
)

"""Architecture ``bailingmoe3``: Ling 3.0 (tiny, flash), with Kimi Delta Attention.

Most layers have a delta net whose rows decay by themselves (Kimi Linear, 2025), with a convolution
before queries, keys and values each; the others have latent attention, whose heads
have a gate each. Experts are chosen as in ``deepseek2``; layers that guess tokens ahead (MTP) are
left out.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .hybrids import HybridRule
from .latent import LatentRule
from .row_decay_tensors import row_decay_tensors
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of

register_architecture(
    ArchitectureSpec(
        name="bailingmoe3",
        qk_row_order="interleaved",
        activation="silu",
        latent=LatentRule(),
        hybrid=HybridRule(mixer="delta_net", row_decays="bounded"),
        experts=ExpertRule(
            shared="required",
            gate="sigmoid",
            has_bias=True,
            has_dense_layers=True,
            has_scales=True,
        ),
        output_gate="per_head",
        has_drafting_layers=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *row_decay_tensors(has_vectors=False),
            *tensors_of(
                "attention", (tensor("blk.{layer}.attn_gate.weight", "model_dim", "n_heads"),)
            ),
            *blocks.BIASED_EXPERTS,
        ),
    )
)

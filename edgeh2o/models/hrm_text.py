"""Architecture ``hrm_text``: HRM-Text 1B and DFM Mimir, two stacks of layers that take turns.

Each stack has a residual stream, its state. A low cycle goes through the first stack some times,
then once through the second; what goes in is the sum of both states. Norms have no weights, and
attention has a gate.
"""

from __future__ import annotations

from . import blocks
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

_EMBEDDING, _, _OUTPUT = blocks.EMBEDDINGS

register_architecture(
    ArchitectureSpec(
        name="hrm_text",
        qk_row_order="half_split",
        has_norm_weights=False,
        has_two_stacks=True,
        activation="silu",
        output_gate="per_output",
        scales={"embedding_scale": "embedding_scale"},
        tensors=(
            _EMBEDDING,
            _OUTPUT,
            tensor("hrm.z_l_init", "model_dim", core_name="first_state.weight"),
            *blocks.ATTENTION,
            tensor("blk.{layer}.attn_gate.weight", "model_dim", "q_dim"),
            *blocks.FEED_FORWARD,
        ),
    )
)

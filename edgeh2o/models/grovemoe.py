"""Architecture ``grovemoe``: GroveMoE 33B-A3B, a mixture whose experts share others.

Made of Qwen3-30B-A3B: beside its experts a token goes through those that they share with their
neighbours, which are smaller (adjugate experts, Wu et al. 2025, "GroveMoE").
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

_ADJUGATES = tuple(
    tensor(f"blk.{{layer}}.ffn_{name}_chexps.weight", *shape, "n_adjugates")
    for name, *shape in (
        ("gate", "model_dim", "adjugate_ffn_dim"),
        ("up", "model_dim", "adjugate_ffn_dim"),
        ("down", "adjugate_ffn_dim", "model_dim"),
    )
)

register_architecture(
    ArchitectureSpec(
        name="grovemoe",
        qk_row_order="half_split",
        qk_norm="head",
        activation="silu",
        experts=ExpertRule(has_adjugates=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.HEAD_NORMS,
            *blocks.EXPERTS,
            *_ADJUGATES,
        ),
    )
)

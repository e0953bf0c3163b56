"""Architecture ``llama-embed``: Llama-Embed-Nemotron, whose tokens read those behind them."""

from __future__ import annotations

from .experts import ExpertRule
from .llama import TENSORS
from .spec import ArchitectureSpec, register_architecture

register_architecture(
    ArchitectureSpec(
        name="llama-embed",
        qk_row_order="interleaved",
        is_causal=False,
        rope_factors="rope_freqs.weight",
        activation="silu",
        experts=ExpertRule(has_own_width=False, is_optional=True),
        tensors=TENSORS,
    )
)

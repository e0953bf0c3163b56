"""Architectures ``eurobert`` (EuroBERT, jina-embeddings-v5-nano) and ``neo-bert`` (NeoBERT).

Llamas whose tokens read those behind them too. Of ``neo-bert`` the matrices of gate and up are one,
neighbouring rows of queries and keys are rotated, and it may rank documents.
"""

from __future__ import annotations

from . import blocks
from .ranking import TANH_RANKING
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor

register_architecture(
    ArchitectureSpec(
        name="eurobert",
        qk_row_order="half_split",
        is_causal=False,
        activation="silu",
        tensors=(
            tensor("token_embd.weight", "model_dim", "vocab_size"),
            tensor("output_norm.weight", "model_dim"),
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.FEED_FORWARD,
        ),
    )
)
register_architecture(
    ArchitectureSpec(
        name="neo-bert",
        qk_row_order="interleaved",
        is_causal=False,
        activation="silu",
        ranking=TANH_RANKING,
        tensors=(
            tensor("token_embd.weight", "model_dim", "vocab_size"),
            tensor("enc.output_norm.weight", "model_dim", core_name="output_norm.weight"),
            *blocks.PRE_NORMS,
            *blocks.ATTENTION,
            *blocks.FUSED_FEED_FORWARD,
        ),
    )
)

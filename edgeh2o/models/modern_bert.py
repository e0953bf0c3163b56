"""Architecture ``modern-bert``: ModernBERT (granite-embedding, gte-modernbert).

Tokens read those behind them too: all in one layer of three, the first, and in a window to both
sides in the others, which have a RoPE base of their own. LayerNorm without biases; the first
layer's mixer has none, as the embedding is normed. Files may name the activation of the gates.
"""

from __future__ import annotations

from . import blocks
from .ranking import RankRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of
from .windows import SlidingWindows

register_architecture(
    ArchitectureSpec(
        name="modern-bert",
        qk_row_order="half_split",
        is_causal=False,
        norm="layer",
        has_embedding_norm=True,
        has_optional_first_norm=True,
        activation="gelu_tanh",
        named_activations={
            "gelu": "gelu_tanh",
            "geglu": "gelu_tanh",
            "silu": "silu",
            "swish": "silu",
            "swiglu": "silu",
            "reglu": "relu",
        },
        ranking=RankRule(activation="gelu_tanh", has_norm=True, pooling="mean"),
        windows=SlidingWindows(
            full_every=3,
            is_full_first=True,
            is_symmetric=True,
            rope_base=10000.0,
            has_plain_rope=True,
        ),
        tensors=(
            tensor("token_embd.weight", "model_dim", "vocab_size"),
            tensor("token_embd_norm.weight", "model_dim"),
            tensor("output_norm.weight", "model_dim"),
            *tensors_of("mixer_norm", (tensor("blk.{layer}.attn_norm.weight", "model_dim"),)),
            tensor("blk.{layer}.ffn_norm.weight", "model_dim"),
            *blocks.ATTENTION,
            *blocks.FUSED_FEED_FORWARD,
        ),
    )
)

"""Architectures ``bert`` (BERT, bge, e5, all-MiniLM) and ``nomic-bert`` (nomic-embed-text).

Tokens read those behind them too; the residual stream is normed behind every branch, and so is the
embedding, with a vector for the first type of token. Positions of ``bert`` are rows of a table, and
its networks have no gate; ``nomic-bert`` rotates queries and keys.
"""

from __future__ import annotations

from . import blocks
from .ranking import TANH_RANKING
from .rope import PLAIN_ROPE, RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import TensorPart, tensor

_SUM_NORMS = tuple(
    tensor(f"{name}.{kind}", "model_dim")
    for name in (
        "token_embd_norm",
        "blk.{layer}.attn_output_norm",
        "blk.{layer}.layer_output_norm",
    )
    for kind in ("weight", "bias")
)
_SHARED = (
    tensor("token_embd.weight", "model_dim", "vocab_size"),
    # All tokens are of the first type.
    tensor(
        "token_types.weight",
        "model_dim",
        "n_token_types",
        required=False,
        parts=(TensorPart("token_types.weight", "one"),),
        is_vectors=True,
    ),
    *_SUM_NORMS,
    *blocks.ATTENTION,
    *blocks.QKV_BIASES,
    *blocks.ATTENTION_OUTPUT_BIAS,
)
_TABLE = (
    tensor("position_embd.weight", "model_dim", "n_positions"),
    *blocks.UNGATED_FEED_FORWARD,
    *blocks.UNGATED_FEED_FORWARD_BIASES,
)

for _name, _own, _is_table in (("bert", _TABLE, True), ("nomic-bert", blocks.FEED_FORWARD, False)):
    register_architecture(
        ArchitectureSpec(
            name=_name,
            qk_row_order="half_split",
            is_causal=False,
            norm="layer",
            norm_placement="sum",
            has_output_norm=False,
            has_embedding_norm=True,
            has_token_types=True,
            activation="ungated_gelu" if _is_table else "silu",
            rope=RopeRule(none_every=1) if _is_table else PLAIN_ROPE,
            has_position_table=_is_table,
            unused_tensors=() if _is_table else blocks.CLASSIFIER,
            ranking=TANH_RANKING if _is_table else None,
            tensors=(*_SHARED, *_own),
        )
    )

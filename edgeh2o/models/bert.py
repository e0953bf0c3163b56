"""Architectures of BERT's kind: ``bert`` (BERT, bge, e5, all-MiniLM, XLM-RoBERTa), ``nomic-bert``
and ``nomic-bert-moe`` (nomic-embed-text), ``jina-bert-v2`` and ``jina-bert-v3`` (jina-embeddings).

Tokens read those behind them too; the residual stream is normed behind every branch, and so is the
embedding, with a vector for the first type of token. Positions of ``bert`` are rows of a table,
``jina-bert-v2`` has a bias by distance (ALiBi), the others rotate queries and keys. Networks have a
gate in ``nomic-bert`` and most of ``jina-bert-v2``, of which jina-embeddings-v2-base-code norms
queries and keys too, and has a second norm behind attention; in every other layer of
``nomic-bert-moe`` there are experts, whose shares do not add up to 1.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .ranking import TANH_RANKING
from .rope import PLAIN_ROPE, RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import TensorPart, TensorRule, tensor, tensors_of

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
_UNGATED = (*blocks.UNGATED_FEED_FORWARD, *blocks.UNGATED_FEED_FORWARD_BIASES)
_JINA_NORMS = blocks.optional(
    (
        *blocks.LAYER_QK_NORMS,
        tensor("blk.{layer}.attn_norm_2.weight", "model_dim"),
        tensor("blk.{layer}.attn_norm_2.bias", "model_dim"),
    )
)
_EXPERTS = tuple(rule for rule in blocks.EXPERTS if "ffn_gate_exps" not in rule.name)


def _register(
    name: str,
    tensors: tuple[TensorRule, ...],
    *,
    activation: str = "ungated_gelu",
    has_table: bool = False,
    is_jina_v2: bool = False,
    experts: ExpertRule | None = None,
) -> None:
    register_architecture(
        ArchitectureSpec(
            name=name,
            qk_row_order="half_split",
            is_causal=False,
            norm="layer",
            norm_placement="sum",
            has_output_norm=False,
            has_embedding_norm=True,
            has_token_types=True,
            activation=activation,
            rope=RopeRule(none_every=1) if has_table or is_jina_v2 else PLAIN_ROPE,
            max_alibi_bias=8.0 if is_jina_v2 else 0.0,
            qk_norm="layer" if is_jina_v2 else "none",
            has_optional_qk_norm=is_jina_v2,
            has_optional_second_norm=is_jina_v2,
            has_any_network=is_jina_v2,
            has_position_table=has_table,
            experts=experts,
            unused_tensors=() if has_table else blocks.CLASSIFIER,
            ranking=TANH_RANKING if has_table else None,
            tensors=(*_SHARED, *tensors),
        )
    )


_register(
    "bert",
    (tensor("position_embd.weight", "model_dim", "n_positions"), *_UNGATED),
    has_table=True,
)
_register("nomic-bert", blocks.FEED_FORWARD, activation="silu")
_register("jina-bert-v2", _JINA_NORMS, activation="gelu_tanh", is_jina_v2=True)
_register("jina-bert-v3", _UNGATED)
_register(
    "nomic-bert-moe",
    (*tensors_of("dense", _UNGATED), *tensors_of("experts", _EXPERTS)),
    experts=ExpertRule(has_own_width=False, is_normalised=False, goes_by_tensors=True),
)

"""Tensors of multi-head latent attention, in both of their layouts.

Files of today hold the products of the latent row per head, that of the keys transposed; older
ones, and all of MiniCPM3, one matrix for keys and values of all heads.
"""

from __future__ import annotations

from dataclasses import replace

from .latent import LatentLayout
from .tensors import TensorPart, TensorRule, tensor, tensors_of

_OUTPUT = tensor("blk.{layer}.attn_output.weight", "latent_out_dim", "model_dim")
_ROW = (
    tensor(
        "blk.{layer}.attn_kv_a_mqa.weight",
        "model_dim",
        "latent_row_dim",
        rotated=True,
        tail_of="latent_row_dim",
        core_name="blk.{layer}.attn_kv_a.weight",
    ),
    tensor("blk.{layer}.attn_kv_a_norm.weight", "latent_rank"),
)
# Of the part that is rotated.
_KEY_NORM = replace(
    tensor("blk.{layer}.attn_k_norm.weight", "latent_rope_dim", rotated=True),
    head_of="latent_rope_dim",
)
_QUERIES_OF_INPUT = (
    tensor(
        "blk.{layer}.attn_q.weight",
        "model_dim",
        "latent_q_dim",
        rotated=True,
        tail_of="latent_head_dim",
    ),
)
_QUERIES_OF_VECTORS = (
    tensor("blk.{layer}.attn_q_a.weight", "model_dim", "latent_q_rank"),
    tensor("blk.{layer}.attn_q_a_norm.weight", "latent_q_rank"),
    tensor(
        "blk.{layer}.attn_q_b.weight",
        "latent_q_rank",
        "latent_q_dim",
        rotated=True,
        tail_of="latent_head_dim",
        core_name="blk.{layer}.attn_q.weight",
    ),
)
_PER_HEAD = (
    tensor("blk.{layer}.attn_k_b.weight", "latent_nope_dim", "latent_rank", "n_heads"),
    tensor("blk.{layer}.attn_v_b.weight", "latent_rank", "latent_value_dim", "n_heads"),
)
# The rows of a head's keys, then those of its values, head after head.
_OF_ALL_HEADS = (
    tensor(
        "blk.{layer}.attn_kv_b.weight",
        "latent_rank",
        "latent_kv_dim",
        parts=(
            TensorPart("blk.{layer}.attn_kv_b_k.{part}.weight", "latent_nope_dim", transposed=True),
            TensorPart("blk.{layer}.attn_v_b.{part}.weight", "latent_value_dim"),
        ),
        repeats="n_heads",
    ),
)


_INDEX_ROTATED = (
    tensor("blk.{layer}.indexer.attn_q_b.weight", "latent_q_rank", "index_q_dim"),
    tensor("blk.{layer}.indexer.attn_k.weight", "model_dim", "index_key_dim"),
    tensor("blk.{layer}.indexer.k_norm.weight", "index_key_dim"),
    tensor("blk.{layer}.indexer.k_norm.bias", "index_key_dim"),
)
_INDEX_WEIGHTS = tensor("blk.{layer}.indexer.proj.weight", "model_dim", "index_heads")


def _index_tensors(*, is_interleaved: bool) -> tuple[TensorRule, ...]:
    """Queries and keys are half-split already unless they are interleaved."""
    rows = tuple(
        replace(rule, rotated=is_interleaved, head_of="index_key_dim") for rule in _INDEX_ROTATED
    )
    return tensors_of("indexer", (*rows, _INDEX_WEIGHTS))


# Whatever a file may have.
ALL_TENSORS = (
    *_ROW,
    *_QUERIES_OF_INPUT,
    *_QUERIES_OF_VECTORS,
    *_PER_HEAD,
    *_OF_ALL_HEADS,
    _OUTPUT,
    *_index_tensors(is_interleaved=False),
)


def latent_tensors(layout: LatentLayout) -> tuple[TensorRule, ...]:
    """Those of attention, as a file of this layout has them."""
    queries = _QUERIES_OF_VECTORS if layout.heads.q_rank else _QUERIES_OF_INPUT
    products = _PER_HEAD if layout.is_per_head else _OF_ALL_HEADS
    index = layout.index
    indexer = () if index is None else _index_tensors(is_interleaved=index.is_interleaved)
    key_norm = (_KEY_NORM,) if layout.norms_keys else ()
    return (*_ROW, *key_norm, *queries, *products, _OUTPUT, *indexer)

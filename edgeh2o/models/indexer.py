"""Lightning indexers of DeepSeek sparse attention: what files say of them.

A small head of its own in a layer of latent attention scores all tokens, and the layer's queries
read those with the largest scores (DeepSeek-V3.2, 2025, section 2.1). Those of Qwen3.8-Flash-Next
score blocks of tokens, beside plain attention, and those of MiniMax M3 too, for every KV head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import FormatError
from ..formats.metadata import quote
from ..layer_config import LatentHeads, LayerConfig
from .keys import ArchitectureKeys

TYPES_KEY = "attention.indexer.types"
RATIOS_KEY = "attention.compress_ratios"
MAX_BLOCK_TOKENS = 64
MAX_HEAD_BLOCK_TOKENS = 2**16
MAX_INDEX_HEADS = 2**10
MAX_INDEX_DIM = 1024
MAX_TOP_K = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRule:
    """What an architecture assumes of its indexers.

    Attributes:
        is_interleaved: the two elements of a rotated pair are neighbours.
        only_full: layers with a window have none.
        may_share: files may say which layers read what the one before them has chosen.
    """

    is_interleaved: bool = False
    only_full: bool = False
    may_share: bool = False


def index_sizes(layer: LayerConfig) -> Mapping[str, int]:
    """Named sizes that the shapes of tensors are declared in."""
    return {
        "index_heads": layer.index_heads,
        "index_key_dim": layer.index_key_dim,
        "index_q_dim": layer.index_heads * layer.index_key_dim,
    }


def with_indexers(
    keys: ArchitectureKeys,
    rule: IndexRule,
    heads: LatentHeads,
    layers: tuple[LayerConfig, ...],
) -> tuple[LayerConfig, ...]:
    """The layers with what chooses for them. Raises ``FormatError`` that names the key."""
    if not heads.q_rank:
        raise FormatError(
            f"{keys.quoted('attention.q_lora_rank')} is missing or 0, but the queries of an "
            "indexer are made of vectors of so many numbers; the file is incomplete"
        )
    n_heads = keys.integer("attention.indexer.head_count", maximum=MAX_INDEX_HEADS)
    key_dim = keys.integer(
        "attention.indexer.key_length", minimum=heads.rope_dim, maximum=MAX_INDEX_DIM
    )
    top_k = keys.integer("attention.indexer.top_k", maximum=MAX_TOP_K)
    if rule.only_full and keys.has(TYPES_KEY):
        full = tuple(not layer.window for layer in layers)
        if keys.flags(TYPES_KEY) != full:
            raise FormatError(
                f"{keys.quoted(TYPES_KEY)} must name the layers without a window, as those that "
                "have an indexer; the file is damaged or was converted wrongly"
            )
    return tuple(
        replace(
            layer,
            index_heads=n_heads if has_own else 0,
            index_key_dim=key_dim if has_own else 0,
            index_top_k=top_k,
        )
        if not (rule.only_full and layer.window)
        else layer
        for layer, has_own in zip(layers, _read_types(keys, rule), strict=True)
    )


def with_block_indexers(
    keys: ArchitectureKeys, rotary_dim: int, layers: tuple[LayerConfig, ...]
) -> tuple[LayerConfig, ...]:
    """The layers, of which those that attend have an indexer of blocks, where a file says so.

    Raises ``FormatError`` that names the key.
    """
    sizes = keys.integers(RATIOS_KEY, minimum=0, maximum=MAX_BLOCK_TOKENS, default=0)
    if not any(sizes):
        return layers
    n_heads = keys.integer("attention.indexer.head_count", maximum=MAX_INDEX_HEADS)
    key_dim = keys.integer(
        "attention.indexer.key_length", minimum=rotary_dim, maximum=MAX_INDEX_DIM
    )
    top_k = keys.integer("attention.indexer.top_k", maximum=MAX_TOP_K)
    if odd := [size for size in sizes if size and top_k % size]:
        raise FormatError(
            f"{keys.quoted('attention.indexer.top_k')} is {top_k}, which is not a multiple of the "
            f"{odd[0]} tokens of a block ({keys.quoted(RATIOS_KEY)})"
        )
    return tuple(
        replace(
            layer,
            index_heads=n_heads,
            index_key_dim=key_dim,
            index_top_k=top_k,
            index_block_tokens=size,
        )
        if size and layer.mixer == "attention"
        else layer
        for layer, size in zip(layers, sizes, strict=True)
    )


def with_head_indexers(
    keys: ArchitectureKeys, rotary_dim: int, layers: tuple[LayerConfig, ...]
) -> tuple[LayerConfig, ...]:
    """The layers, of which those with experts have an indexer that chooses for every KV head.

    Raises ``FormatError`` that names the key.
    """
    n_heads = keys.integer("attention.indexer.head_count", maximum=MAX_INDEX_HEADS)
    key_dim = keys.integer(
        "attention.indexer.key_length", minimum=rotary_dim, maximum=MAX_INDEX_DIM
    )
    size = keys.integer("attention.indexer.block_size", maximum=MAX_HEAD_BLOCK_TOKENS)
    n_blocks = keys.integer("attention.indexer.top_k", maximum=MAX_TOP_K // size)
    n_local = keys.integer("attention.indexer.local_blocks", minimum=0, maximum=n_blocks)
    if odd := [layer.n_kv_heads for layer in layers if layer.n_kv_heads != n_heads]:
        raise FormatError(
            f"{keys.quoted('attention.indexer.head_count')} is {n_heads}, but layers have {odd[0]} "
            "KV heads, each of which needs a head of the indexer; the file is damaged"
        )
    return tuple(
        layer
        if layer.is_dense
        else replace(
            layer,
            index_heads=n_heads,
            index_key_dim=key_dim,
            index_top_k=n_blocks * size,
            index_block_tokens=size,
            index_per_head=True,
            index_local_blocks=n_local,
        )
        for layer in layers
    )


def _read_types(keys: ArchitectureKeys, rule: IndexRule) -> tuple[bool, ...]:
    """Which layers have an indexer of their own."""
    if not rule.may_share or not keys.has(TYPES_KEY):
        return (True,) * keys.n_layers
    name = keys.full(TYPES_KEY)
    types = keys.metadata.get_array(name, kinds="b", length=keys.n_layers).tolist()
    if not types[0]:
        raise FormatError(
            f"metadata key {quote(name)} says that the first layer reads what a layer before it "
            "has chosen; the file is damaged or was converted wrongly"
        )
    return tuple(types)

"""Multi-head latent attention: the sizes of heads as files give them.

Files of today name them apart from those of the cached rows (``key_length_mla``); older ones, and
all of MiniCPM3, have no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import FormatError
from ..layer_config import LatentHeads
from .indexer import IndexRule
from .keys import ArchitectureKeys

KEY_LENGTH = "attention.key_length_mla"
VALUE_LENGTH = "attention.value_length_mla"
MAX_RANK = 2**14
MAX_PART_DIM = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRule:
    """What an architecture assumes of its latent attention.

    Attributes:
        has_lengths: files may name the sizes of heads apart from those of the cached rows, and then
            have matrices per head.
        has_sliding_heads: layers with a window have heads of other sizes, which files give.
        norms_keys: the part of keys that is rotated has a norm.
        index: None: queries read everything; else layers have indexers.
    """

    has_lengths: bool = True
    has_sliding_heads: bool = False
    norms_keys: bool = False
    index: IndexRule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayout:
    """The heads of a file, whether it has matrices per head, and its indexers.

    ``sliding`` are the heads of layers with a window, if they are others.
    """

    heads: LatentHeads
    is_per_head: bool
    sliding: LatentHeads | None = None
    norms_keys: bool = False
    index: IndexRule | None = None


def latent_sizes(latent: LatentHeads | None, n_heads: int) -> Mapping[str, int]:
    """Named sizes that the shapes of tensors are declared in."""
    if latent is None:
        return {}
    return {
        "latent_rank": latent.rank,
        "latent_q_rank": latent.q_rank,
        "latent_rope_dim": latent.rope_dim,
        "latent_row_dim": latent.row_dim,
        "latent_head_dim": latent.head_dim,
        "latent_nope_dim": latent.nope_dim,
        "latent_value_dim": latent.value_dim,
        "latent_q_dim": n_heads * latent.head_dim,
        "latent_kv_dim": n_heads * (latent.nope_dim + latent.value_dim),
        "latent_out_dim": n_heads * latent.value_dim,
    }


def read_latent(
    keys: ArchitectureKeys, rule: LatentRule, model_dim: int, n_heads: int
) -> LatentLayout:
    """Raises ``FormatError`` that names the key."""
    rank = keys.integer("attention.kv_lora_rank", maximum=MAX_RANK)
    q_rank = keys.integer("attention.q_lora_rank", minimum=0, maximum=MAX_RANK, default=0)
    rope_dim = keys.integer("rope.dimension_count", minimum=2, maximum=MAX_PART_DIM)
    if rope_dim % 2:
        raise FormatError(f"{keys.quoted('rope.dimension_count')} is {rope_dim}, but must be even")
    is_per_head = rule.has_lengths and (keys.has(KEY_LENGTH) or keys.has(VALUE_LENGTH))
    if is_per_head:
        key_name = KEY_LENGTH
        value_dim = keys.integer(VALUE_LENGTH, maximum=MAX_PART_DIM)
        for name, expected in (("key", rank + rope_dim), ("value", rank)):
            key = f"attention.{name}_length"
            found = keys.integer(key, maximum=2**16, default=expected)
            if found != expected:
                raise FormatError(
                    f"{keys.quoted(key)} is {found}, but must be {expected}, as kv_lora_rank and "
                    "rope.dimension_count make it; the file is damaged"
                )
    else:
        key_name = "attention.key_length"
        value_dim = keys.integer(
            "attention.value_length", maximum=MAX_PART_DIM, default=model_dim // n_heads or None
        )
    head_dim = keys.integer(key_name, minimum=rope_dim + 1, maximum=2 * MAX_PART_DIM)
    heads = LatentHeads(
        rank=rank,
        q_rank=q_rank,
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
    )
    return LatentLayout(
        heads=heads,
        is_per_head=is_per_head,
        sliding=_read_sliding(keys, heads) if rule.has_sliding_heads else None,
        norms_keys=rule.norms_keys,
        index=rule.index,
    )


def _read_sliding(keys: ArchitectureKeys, heads: LatentHeads) -> LatentHeads:
    """Those of layers with a window."""
    head_dim = keys.integer(
        f"{KEY_LENGTH}_swa", minimum=heads.rope_dim + 1, maximum=2 * MAX_PART_DIM
    )
    return LatentHeads(
        rank=keys.integer("attention.kv_lora_rank_swa", maximum=MAX_RANK),
        q_rank=heads.q_rank,
        nope_dim=head_dim - heads.rope_dim,
        rope_dim=heads.rope_dim,
        value_dim=keys.integer(f"{VALUE_LENGTH}_swa", maximum=MAX_PART_DIM),
    )

"""Reads what single layers have, heads, widths and limits, from GGUF metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import FormatError
from ..layer_config import LayerConfig
from .experts import NO_LIMITS, FeedForwardSizes
from .hybrids import HybridRule, replace_attention
from .keys import ArchitectureKeys

SHARED_KV_KEY = "attention.shared_kv_layers"

MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**13


def read_layers(
    keys: ArchitectureKeys,
    feed_forward: FeedForwardSizes,
    windows: Sequence[int],
    has_rope: Sequence[bool],
    hybrid: HybridRule | None,
) -> tuple[LayerConfig, ...]:
    """With ``windows`` and ``has_rope`` of every layer. Raises FormatError for bad numbers."""
    has_no_heads = hybrid is not None and (
        hybrid.mixer == "none" or hybrid.selects or not hybrid.has_attention
    )
    n_heads = n_kv_heads = keys.integers(
        "attention.head_count", maximum=MAX_HEADS, minimum=0 if has_no_heads else 1
    )
    if keys.has("attention.head_count_kv"):
        fewest = 0 if hybrid is not None and hybrid.goes_by_kv_heads else 1
        n_kv_heads = keys.integers("attention.head_count_kv", maximum=MAX_HEADS, minimum=fewest)
    for layer, (heads, kv_heads) in enumerate(zip(n_heads, n_kv_heads, strict=True)):
        if kv_heads and heads % kv_heads:
            raise FormatError(
                f"{keys.quoted('attention.head_count')} is {heads} in layer {layer}, which is not "
                f"a multiple of {keys.quoted('attention.head_count_kv')} {kv_heads}"
            )
    layers = tuple(
        LayerConfig(
            n_heads=heads,
            n_kv_heads=kv_heads,
            ffn_dim=ffn_dim,
            window=window,
            has_rope=rotates,
            is_dense=layer < feed_forward.n_dense_layers,
        )
        for layer, (heads, kv_heads, ffn_dim, window, rotates) in enumerate(
            zip(n_heads, n_kv_heads, feed_forward.ffn_dims, windows, has_rope, strict=True)
        )
    )
    return layers if hybrid is None else replace_attention(keys, hybrid, layers)


def with_limits(
    layers: tuple[LayerConfig, ...], feed_forward: FeedForwardSizes
) -> tuple[LayerConfig, ...]:
    """With the limits of gates; networks in the place of experts have those of shared ones."""
    of_experts = feed_forward.gate_limits or (NO_LIMITS,) * len(layers)
    of_shared = feed_forward.shared_limits or (NO_LIMITS,) * len(layers)
    limited = []
    for layer, own, shared in zip(layers, of_experts, of_shared, strict=True):
        if layer.is_dense:
            own, shared = shared, NO_LIMITS
        limited.append(
            replace(
                layer,
                gate_limit=own.gate,
                up_limit=own.up,
                shared_gate_limit=shared.gate,
                shared_up_limit=shared.up,
            )
        )
    return tuple(limited)


def read_head_dims(
    keys: ArchitectureKeys, model_dim: int, n_heads: int, *, may_differ: bool
) -> tuple[int, int]:
    """Of keys and of values; only where they ``may_differ`` these may have other sizes."""
    if not keys.has("attention.key_length") and model_dim % n_heads:
        raise FormatError(
            f"{keys.quoted('embedding_length')} is {model_dim}, which does not divide by "
            f"{keys.quoted('attention.head_count')} {n_heads}, and "
            f"{keys.quoted('attention.key_length')} is missing"
        )
    head_dim = keys.integer(
        "attention.key_length", maximum=MAX_HEAD_DIM, default=model_dim // n_heads
    )
    value_dim = keys.integer("attention.value_length", maximum=MAX_HEAD_DIM, default=head_dim)
    if value_dim != head_dim and not may_differ:
        raise FormatError(
            f"{keys.quoted('attention.value_length')} is {value_dim}, but heads whose values "
            f"differ in size from their keys ({head_dim}) are not supported"
        )
    if head_dim % 2:
        raise FormatError(
            f"the head size {head_dim} ({keys.quoted('attention.key_length')} or embedding_length "
            "/ head_count) must be even"
        )
    return head_dim, value_dim


def read_rotary_dim(
    keys: ArchitectureKeys, key: str, head_dim: int, *, default: int | None = None
) -> int:
    """How many numbers of a head are rotated, which is even; ``default`` None: all of them."""
    rotary_dim = keys.integer(key, maximum=MAX_HEAD_DIM, default=default or head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise FormatError(
            f"{keys.quoted(key)} is {rotary_dim}, but must be even and at most "
            f"the head size {head_dim}"
        )
    return rotary_dim


def read_sliding_head_dim(keys: ArchitectureKeys) -> int:
    """Of keys and values in layers with a window."""
    head_dim = keys.integer("attention.key_length_swa", maximum=MAX_HEAD_DIM)
    value_dim = keys.integer("attention.value_length_swa", maximum=MAX_HEAD_DIM)
    if value_dim != head_dim or head_dim % 2:
        raise FormatError(
            f"{keys.quoted('attention.value_length_swa')} is {value_dim}, but must be even and "
            f"equal to the keys' {head_dim}"
        )
    return head_dim


def share_kv(
    keys: ArchitectureKeys, layers: tuple[LayerConfig, ...], *, default: int | None
) -> tuple[LayerConfig, ...]:
    """The last layers read the keys and values of the last of their kind before them."""
    n_shared = keys.integer(SHARED_KV_KEY, minimum=0, maximum=len(layers) - 1, default=default)
    n_own = len(layers) - n_shared
    shared = list(layers[:n_own])
    for index, layer in enumerate(layers[n_own:], n_own):
        kinds = [i for i in range(n_own) if (layers[i].window > 0) == (layer.window > 0)]
        if not kinds or layers[kinds[-1]].n_kv_heads != layer.n_kv_heads:
            raise FormatError(
                f"{keys.quoted(SHARED_KV_KEY)} is {n_shared}, but layer {index} finds no layer of "
                "its kind and KV heads to share with; the file is damaged"
            )
        shared.append(replace(layer, kv_distance=index - kinds[-1]))
    return tuple(shared)

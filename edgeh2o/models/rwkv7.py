"""Architectures ``rwkv7`` and ``arwkv7``: layers with a recurrent state alone.

No layer attends. What goes into a mixer, and in RWKV-7 "Goose" into a network, has that of the
token before in it. ARWKV has the networks of Qwen2 instead, and mixers that may have no gates, and
no norms of heads.
"""

from __future__ import annotations

from .hybrids import HybridRule
from .rope import RopeRule
from .rwkv import (
    EMBEDDINGS_AND_NORMS,
    HEAD_NORM,
    LAYER,
    MIX,
    NETWORK,
    PLAIN_LAYERS,
    SHARES,
    mixer_matrices,
)
from .spec import ArchitectureSpec, register_architecture
from .tensors import TensorRule, tensor, tensors_of


def _pair(name: str, size: str) -> tuple[TensorRule, ...]:
    """Two matrices with a vector between, and the bias of what they make."""
    return (
        tensor(f"{MIX}{name}0.weight", "model_dim"),
        tensor(f"{MIX}{name}1.weight", "model_dim", size),
        tensor(f"{MIX}{name}2.weight", size, "model_dim"),
    )


_GATE = _pair("g", "wkv_gate_rank")[1:]

_MIXER = (
    *SHARES,
    *mixer_matrices("receptance", "key", "value", "output"),
    *_pair("w", "wkv_decay_rank"),
    *_pair("a", "wkv_rate_rank"),
    *tensors_of("shared_values", _pair("v", "wkv_value_rank")),
    *tensors_of("wkv_gates", _GATE),
    *(tensor(f"{MIX}{name}.weight", "model_dim") for name in ("k_k", "k_a", "r_k")),
)
# The first layer hands its values on, and takes none.
_UNUSED = tuple(f"blk.0.time_mix_v{i}.weight" for i in range(3))

register_architecture(
    ArchitectureSpec(
        name="rwkv7",
        qk_row_order="half_split",
        rope=RopeRule(none_every=1),
        activation="relu_squared",
        norm="layer",
        has_embedding_norm=True,
        hybrid=HybridRule(mixer="rwkv7", has_attention=False),
        unused_tensors=_UNUSED,
        tensors=(
            *EMBEDDINGS_AND_NORMS,
            *_MIXER,
            tensor(f"{LAYER}channel_mix_lerp_k.weight", "model_dim", "one", is_vectors=True),
            *NETWORK,
        ),
    )
)

register_architecture(
    ArchitectureSpec(
        name="arwkv7",
        qk_row_order="half_split",
        rope=RopeRule(none_every=1),
        activation="silu",
        hybrid=HybridRule(mixer="rwkv7", has_attention=False, has_shifted_network=False),
        unused_tensors=_UNUSED,
        tensors=(*PLAIN_LAYERS, *_MIXER, *tensors_of("wkv_norms", HEAD_NORM)),
    )
)

"""Architectures ``rwkv6`` and ``rwkv6qwen2``: layers with a recurrent state alone.

As in ``rwkv7`` no layer attends. How much of the token before goes into what a mixer reads is made
of both tokens too. The former is RWKV-6 "Finch"; the latter (QRWKV6) has linear attention in its
place, whose keys and values are of fewer heads, and the networks of Qwen2.
"""

from __future__ import annotations

from . import blocks
from .hybrids import HybridRule
from .rope import RopeRule
from .rwkv import (
    EMBEDDINGS_AND_NORMS,
    LAYER,
    MIX,
    NETWORK,
    PLAIN_LAYERS,
    SHARES,
    mixer_matrices,
)
from .spec import ArchitectureSpec, register_architecture
from .tensors import TensorRule, tensor


def _vector(name: str, core_name: str = "", *, required: bool = True) -> TensorRule:
    return tensor(
        f"{name}.weight",
        "model_dim",
        "one",
        core_name=core_name,
        is_vectors=True,
        required=required,
    )


_MIXER = (
    _vector(f"{MIX}lerp_x"),
    tensor(f"{MIX}w1.weight", "model_dim", "wkv_shifts_dim"),
    tensor(f"{MIX}w2.weight", "wkv_shift_rank", "model_dim", "n_wkv_shares"),
    tensor(f"{MIX}decay_w1.weight", "model_dim", "wkv_decay_rank"),
    tensor(f"{MIX}decay_w2.weight", "wkv_decay_rank", "model_dim"),
    tensor(f"{MIX}decay.weight", "model_dim"),
    *mixer_matrices("receptance", "gate", "output"),
    *(tensor(f"{MIX}{name}.weight", "model_dim", "wkv_kv_dim") for name in ("key", "value")),
)

register_architecture(
    ArchitectureSpec(
        name="rwkv6",
        qk_row_order="half_split",
        rope=RopeRule(none_every=1),
        activation="relu_squared",
        norm="layer",
        has_embedding_norm=True,
        hybrid=HybridRule(mixer="rwkv6", has_attention=False),
        tensors=(
            *EMBEDDINGS_AND_NORMS,
            *_MIXER,
            *blocks.optional(SHARES),
            # Of older files.
            *(
                _vector(f"{MIX}lerp_{name}", f"{MIX}lerp_fused.{i}.weight", required=False)
                for i, name in enumerate("wkvrg")
            ),
            tensor(f"{MIX}first.weight", "wkv_head_dim", "n_wkv_heads", is_vectors=True),
            *(_vector(f"{LAYER}channel_mix_lerp_{name}") for name in "kr"),
            tensor(f"{LAYER}channel_mix_receptance.weight", "model_dim", "model_dim"),
            *NETWORK,
        ),
    )
)

register_architecture(
    ArchitectureSpec(
        name="rwkv6qwen2",
        qk_row_order="half_split",
        rope=RopeRule(none_every=1),
        activation="silu",
        hybrid=HybridRule(
            mixer="rwkv6", has_attention=False, has_shifted_network=False, groups_keys=True
        ),
        tensors=(
            *PLAIN_LAYERS,
            *_MIXER,
            *SHARES,
            tensor(f"{MIX}receptance.bias", "model_dim", required=False),
            *(
                tensor(f"{MIX}{name}.bias", "wkv_kv_dim", required=False)
                for name in ("key", "value")
            ),
        ),
    )
)

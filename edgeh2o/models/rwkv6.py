"""Architecture ``rwkv6``: RWKV-6 "Finch", layers with a recurrent state alone.

As ``rwkv7`` no layer attends. How much of the token before goes into what a mixer reads is made of
both tokens too.
"""

from __future__ import annotations

from . import blocks
from .hybrids import HybridRule
from .rope import RopeRule
from .rwkv import EMBEDDINGS_AND_NORMS, LAYER, MIX, NETWORK, SHARES, mixer_matrices
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
            _vector(f"{MIX}lerp_x"),
            *blocks.optional(SHARES),
            # Of older files.
            *(
                _vector(f"{MIX}lerp_{name}", f"{MIX}lerp_fused.{i}.weight", required=False)
                for i, name in enumerate("wkvrg")
            ),
            tensor(f"{MIX}w1.weight", "model_dim", "wkv_shifts_dim"),
            tensor(f"{MIX}w2.weight", "wkv_shift_rank", "model_dim", "n_wkv_shares"),
            tensor(f"{MIX}decay_w1.weight", "model_dim", "wkv_decay_rank"),
            tensor(f"{MIX}decay_w2.weight", "wkv_decay_rank", "model_dim"),
            tensor(f"{MIX}decay.weight", "model_dim"),
            tensor(f"{MIX}first.weight", "wkv_head_dim", "n_wkv_heads", is_vectors=True),
            *mixer_matrices("receptance", "key", "value", "gate", "output"),
            *(_vector(f"{LAYER}channel_mix_lerp_{name}") for name in "kr"),
            tensor(f"{LAYER}channel_mix_receptance.weight", "model_dim", "model_dim"),
            *NETWORK,
        ),
    )
)

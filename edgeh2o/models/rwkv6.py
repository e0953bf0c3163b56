"""Architecture ``rwkv6``: RWKV-6 "Finch", layers with a recurrent state alone.

As ``rwkv7`` no layer attends. How much of the token before goes into what a mixer reads is made of
both tokens too.
"""

from __future__ import annotations

from . import blocks
from .hybrids import HybridRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import TensorPart, TensorRule, tensor

_LAYER = "blk.{layer}."
_MIX = _LAYER + "time_mix_"
_EMBEDDING, _, _OUTPUT = blocks.EMBEDDINGS


def _norm(name: str, core_name: str) -> tuple[TensorRule, ...]:
    return tuple(
        tensor(f"{name}.{kind}", "model_dim", core_name=f"{core_name}.{kind}")
        for kind in ("weight", "bias")
    )


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
            _EMBEDDING,
            _OUTPUT,
            *_norm("token_embd_norm", "token_embd_norm"),
            *_norm("output_norm", "output_norm"),
            *_norm(f"{_LAYER}attn_norm", f"{_LAYER}attn_norm"),
            *_norm(f"{_LAYER}attn_norm_2", f"{_LAYER}ffn_norm"),
            *_norm(f"{_MIX}ln", f"{_MIX}ln"),
            _vector(f"{_MIX}lerp_x"),
            tensor(
                f"{_MIX}lerp_fused.weight",
                "model_dim",
                "n_wkv_shares",
                parts=(TensorPart(f"{_MIX}lerp_fused.{{part}}.weight", "one"),),
                is_vectors=True,
                required=False,
            ),
            # Of older files.
            *(
                _vector(f"{_MIX}lerp_{name}", f"{_MIX}lerp_fused.{i}.weight", required=False)
                for i, name in enumerate("wkvrg")
            ),
            tensor(f"{_MIX}w1.weight", "model_dim", "wkv_shifts_dim"),
            tensor(f"{_MIX}w2.weight", "wkv_shift_rank", "model_dim", "n_wkv_shares"),
            tensor(f"{_MIX}decay_w1.weight", "model_dim", "wkv_decay_rank"),
            tensor(f"{_MIX}decay_w2.weight", "wkv_decay_rank", "model_dim"),
            tensor(f"{_MIX}decay.weight", "model_dim"),
            tensor(f"{_MIX}first.weight", "wkv_head_dim", "n_wkv_heads", is_vectors=True),
            *(
                tensor(f"{_MIX}{name}.weight", "model_dim", "model_dim")
                for name in ("receptance", "key", "value", "gate", "output")
            ),
            *(_vector(f"{_LAYER}channel_mix_lerp_{name}") for name in "kr"),
            tensor(f"{_LAYER}channel_mix_receptance.weight", "model_dim", "model_dim"),
            tensor(
                f"{_LAYER}channel_mix_key.weight",
                "model_dim",
                "ffn_dim",
                core_name=f"{_LAYER}ffn_up.weight",
            ),
            tensor(
                f"{_LAYER}channel_mix_value.weight",
                "ffn_dim",
                "model_dim",
                core_name=f"{_LAYER}ffn_down.weight",
            ),
        ),
    )
)

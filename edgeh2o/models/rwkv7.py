"""Architecture ``rwkv7``: RWKV-7 "Goose", layers with a recurrent state alone.

No layer attends. What goes into a mixer and into a network has that of the token before in it.
"""

from __future__ import annotations

from . import blocks
from .hybrids import HybridRule
from .rope import RopeRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import TensorPart, TensorRule, tensor, tensors_of

_LAYER = "blk.{layer}."
_MIX = _LAYER + "time_mix_"


def _pair(name: str, size: str) -> tuple[TensorRule, ...]:
    """Two matrices with a vector between, and the bias of what they make."""
    return (
        tensor(f"{_MIX}{name}0.weight", "model_dim"),
        tensor(f"{_MIX}{name}1.weight", "model_dim", size),
        tensor(f"{_MIX}{name}2.weight", size, "model_dim"),
    )


def _norm(name: str, core_name: str) -> tuple[TensorRule, ...]:
    return tuple(
        tensor(f"{name}.{kind}", "model_dim", core_name=f"{core_name}.{kind}")
        for kind in ("weight", "bias")
    )


_EMBEDDING, _, _OUTPUT = blocks.EMBEDDINGS
_GATE = _pair("g", "wkv_gate_rank")[1:]

register_architecture(
    ArchitectureSpec(
        name="rwkv7",
        qk_row_order="half_split",
        rope=RopeRule(none_every=1),
        activation="relu_squared",
        norm="layer",
        has_embedding_norm=True,
        hybrid=HybridRule(mixer="rwkv7", has_attention=False),
        # The first layer hands its values on, and takes none.
        unused_tensors=tuple(f"blk.0.time_mix_v{i}.weight" for i in range(3)),
        tensors=(
            _EMBEDDING,
            _OUTPUT,
            *_norm("token_embd_norm", "token_embd_norm"),
            *_norm("output_norm", "output_norm"),
            *_norm(f"{_LAYER}attn_norm", f"{_LAYER}attn_norm"),
            *_norm(f"{_LAYER}attn_norm_2", f"{_LAYER}ffn_norm"),
            *_norm(f"{_MIX}ln", f"{_MIX}ln"),
            tensor(
                f"{_MIX}lerp_fused.weight",
                "model_dim",
                "n_wkv_shares",
                parts=(TensorPart(f"{_MIX}lerp_fused.{{part}}.weight", "one"),),
                is_vectors=True,
            ),
            *(
                tensor(f"{_MIX}{name}.weight", "model_dim", "model_dim")
                for name in ("receptance", "key", "value", "output")
            ),
            *_pair("w", "wkv_decay_rank"),
            *_pair("a", "wkv_rate_rank"),
            *tensors_of("shared_values", _pair("v", "wkv_value_rank")),
            *_GATE,
            *(tensor(f"{_MIX}{name}.weight", "model_dim") for name in ("k_k", "k_a", "r_k")),
            tensor(f"{_LAYER}channel_mix_lerp_k.weight", "model_dim", "one", is_vectors=True),
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

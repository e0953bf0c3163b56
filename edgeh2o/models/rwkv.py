"""Tensors that the RWKV families share."""

from __future__ import annotations

from . import blocks
from .tensors import TensorPart, TensorRule, tensor

LAYER = "blk.{layer}."
MIX = LAYER + "time_mix_"
_EMBEDDING, _, _OUTPUT = blocks.EMBEDDINGS


def _norm(name: str, core_name: str) -> tuple[TensorRule, ...]:
    return tuple(
        tensor(f"{name}.{kind}", "model_dim", core_name=f"{core_name}.{kind}")
        for kind in ("weight", "bias")
    )


HEAD_NORM = _norm(f"{MIX}ln", f"{MIX}ln")
# Of models whose layers are those of RWKV but for their mixers, which have RMS norms.
PLAIN_LAYERS = (*blocks.EMBEDDINGS, *blocks.PRE_NORMS, *blocks.FEED_FORWARD)
EMBEDDINGS_AND_NORMS = (
    _EMBEDDING,
    _OUTPUT,
    *_norm("token_embd_norm", "token_embd_norm"),
    *_norm("output_norm", "output_norm"),
    *_norm(f"{LAYER}attn_norm", f"{LAYER}attn_norm"),
    *_norm(f"{LAYER}attn_norm_2", f"{LAYER}ffn_norm"),
    *HEAD_NORM,
)
# How much of the token before goes into what the matrices of a mixer read.
SHARES = (
    tensor(
        f"{MIX}lerp_fused.weight",
        "model_dim",
        "n_wkv_shares",
        parts=(TensorPart(f"{MIX}lerp_fused.{{part}}.weight", "one"),),
        is_vectors=True,
    ),
)
NETWORK = (
    tensor(
        f"{LAYER}channel_mix_key.weight", "model_dim", "ffn_dim", core_name=f"{LAYER}ffn_up.weight"
    ),
    tensor(
        f"{LAYER}channel_mix_value.weight",
        "ffn_dim",
        "model_dim",
        core_name=f"{LAYER}ffn_down.weight",
    ),
)


def mixer_matrices(*names: str) -> tuple[TensorRule, ...]:
    """Square ones, by their names in files behind ``time_mix_``."""
    return tuple(tensor(f"{MIX}{name}.weight", "model_dim", "model_dim") for name in names)

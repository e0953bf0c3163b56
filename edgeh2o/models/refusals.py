"""Keys that change what a model computes, and that only some architectures read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..errors import FormatError
from ..formats.metadata import Metadata, quote

# By the part after the architecture's name: the values that say "not here". Any other value in a
# file of an architecture that does not read the key means a variant that would be computed wrongly.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.rope_pattern": (),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.value_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "embedding_length_per_layer_input": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0.0, 1.0),  # none, softmax
    "expert_group_count": (0.0, 1.0),
    "expert_shared_feed_forward_length": (0.0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "interleave_moe_layer_step": (0.0, 1.0),
    "leading_dense_block_count": (0.0,),
    "logit_scale": (0.0, 1.0),
    "moe_latent_size": (0.0,),
    "nextn_predict_layers": (0.0,),
    "num_loops": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "ssm.dt_b_c_rms": (0.0,),
    "swiglu_clamp_exp": (0.0,),
    "swiglu_clamp_shexp": (0.0,),
}


def _is_array_of(value: object, neutral: tuple[float, ...]) -> bool:
    """Whether it says of every layer that there is nothing."""
    numbers = value.tolist() if hasattr(value, "tolist") else ()
    return bool(numbers) and all(number in neutral for number in numbers)


def refuse_unread(metadata: Metadata, architecture: str, read: Collection[str]) -> None:
    """Raises ``FormatError`` that names a key with an effect which is not among those ``read``."""
    for suffix, neutral in _NEUTRAL.items():
        key = f"{architecture}.{suffix}"
        if suffix in read or key not in metadata:
            continue
        value = metadata.get(key)
        if _is_array_of(value, neutral):
            continue
        if not isinstance(value, (int, float)) or value not in neutral:
            shown = f" is {value:g}" if isinstance(value, (int, float)) else ""
            raise FormatError(
                f"metadata key {quote(key)}{shown}, which is not supported for this "
                "architecture; leaving it out would give wrong answers"
            )

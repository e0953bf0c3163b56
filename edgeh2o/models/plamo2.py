"""Architecture ``plamo2``: PLaMo 2, whose layers have Mamba-2 or attention by turns.

Mamba-2 makes what it selects by of its channels, as Mamba-1 does. Branches are normed at both ends,
and queries and keys per head, each by weights of its own. Whole heads are rotated, as in the
original models: no file says so.
"""

from __future__ import annotations

from . import blocks
from .hybrids import HybridRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of

_LAYER = "blk.{layer}."
# Files leave out the end of these names.
_SHORT_NAMES = tuple(
    tensor(f"{_LAYER}{name}", size, core_name=f"{_LAYER}{name}.weight")
    for name, size in (("post_attention_norm", "model_dim"), ("post_ffw_norm", "model_dim"))
)
_SELECTION_NORMS = tuple(
    tensor(f"{_LAYER}ssm_{name}_norm", size, core_name=f"{_LAYER}ssm_{name}_norm.weight")
    for name, size in (("dt", "ssd_step_rank"), ("b", "ssd_state_dim"), ("c", "ssd_state_dim"))
)
_MAMBA = (
    # Of every head the gate, then the channels.
    tensor(f"{_LAYER}ssm_in.weight", "model_dim", "ssd_in_dim", groups="n_ssd_heads"),
    tensor(f"{_LAYER}ssm_conv1d.weight", "n_conv_taps", "ssd_conv_dim", is_vectors=True),
    tensor(f"{_LAYER}ssm_x.weight", "ssd_inner_dim", "ssd_projected_dim"),
    tensor(f"{_LAYER}ssm_dt.weight", "ssd_step_rank", "n_ssd_heads"),
    tensor(f"{_LAYER}ssm_dt.bias", "n_ssd_heads"),
    tensor(f"{_LAYER}ssm_a", "n_ssd_heads"),
    tensor(f"{_LAYER}ssm_d", "n_ssd_heads"),
    tensor(f"{_LAYER}ssm_out.weight", "ssd_inner_dim", "model_dim"),
    *_SELECTION_NORMS,
)
_HEAD_NORMS = (
    tensor(f"{_LAYER}attn_q_norm.weight", "head_dim", "n_heads", is_vectors=True),
    tensor(f"{_LAYER}attn_k_norm.weight", "head_dim", "n_kv_heads", is_vectors=True),
)

register_architecture(
    ArchitectureSpec(
        name="plamo2",
        qk_row_order="half_split",
        norm_placement="both",
        qk_norm="own_head",
        activation="silu",
        hybrid=HybridRule(mixer="mamba2", selects=True),
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *_SHORT_NAMES,
            *tensors_of("mamba2", _MAMBA),
            *tensors_of("attention", (*blocks.FUSED_ATTENTION, *_HEAD_NORMS)),
            *blocks.FUSED_FEED_FORWARD,
        ),
    )
)

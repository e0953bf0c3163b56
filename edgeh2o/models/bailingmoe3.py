"""Architecture ``bailingmoe3``: Ling 3.0 (tiny, flash), with Kimi Delta Attention.

Most layers have a delta net whose rows decay by themselves (Kimi Linear, 2025), with a convolution
before queries, keys and values each; the others have latent attention, whose heads
have a gate each. Experts are chosen as in ``deepseek2``; layers that guess tokens ahead (MTP) are
left out.
"""

from __future__ import annotations

from . import blocks
from .experts import ExpertRule
from .hybrids import HybridRule
from .latent import LatentRule
from .spec import ArchitectureSpec, register_architecture
from .tensors import tensor, tensors_of

_PARTS = ("q", "k", "v")
_DELTA_NET = (
    *(
        tensor(f"blk.{{layer}}.attn_{name}.weight", "model_dim", "delta_value_dim")
        for name in _PARTS
    ),
    *(
        tensor(
            f"blk.{{layer}}.ssm_conv1d_{name}.weight",
            "n_conv_taps",
            "delta_value_dim",
            is_vectors=True,
        )
        for name in _PARTS
    ),
    tensor("blk.{layer}.ssm_f_a.weight", "model_dim", "delta_value_dim"),
    tensor("blk.{layer}.ssm_g_a.weight", "model_dim", "delta_value_dim"),
    tensor("blk.{layer}.ssm_beta.weight", "model_dim", "n_delta_heads"),
    tensor("blk.{layer}.ssm_a", "one", "n_delta_heads", is_vectors=True),
    tensor("blk.{layer}.ssm_dt.bias", "delta_value_dim"),
    tensor("blk.{layer}.ssm_norm.weight", "delta_head_dim"),
    tensor("blk.{layer}.attn_output.weight", "delta_value_dim", "model_dim"),
)

register_architecture(
    ArchitectureSpec(
        name="bailingmoe3",
        qk_row_order="interleaved",
        activation="silu",
        latent=LatentRule(),
        hybrid=HybridRule(mixer="delta_net", decays_by_row=True),
        experts=ExpertRule(
            shared="required",
            gate="sigmoid",
            has_bias=True,
            has_dense_layers=True,
            has_scales=True,
        ),
        output_gate="per_head",
        has_drafting_layers=True,
        tensors=(
            *blocks.EMBEDDINGS,
            *blocks.PRE_NORMS,
            *tensors_of("delta_net", _DELTA_NET),
            *tensors_of(
                "attention", (tensor("blk.{layer}.attn_gate.weight", "model_dim", "n_heads"),)
            ),
            *blocks.BIASED_EXPERTS,
        ),
    )
)

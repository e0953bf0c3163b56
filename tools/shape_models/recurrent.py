"""Recurrent layers of shapes: tensors and keys of delta nets, Mamba and RWKV."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gguf import GGUFWriter

from tools.shape_models.shape import Shape
from tools.shape_models.tensor import Tensor

# Float matrices, whose mean is 0.
FLOAT_MATRICES = tuple(
    f".time_mix_{name}{i}.weight" for name in ("w", "a", "v", "decay_w") for i in (1, 2)
)


def recurrent_tensors(
    prefix: str, shape: Shape, matrix: Callable[..., Tensor], vectors: Callable[..., Tensor]
) -> Iterator[Tensor]:
    """Tensors of a layer without attention; matrix(name, rows, cols) and vectors(name, *sizes)
    make one of the usual type and one of floats."""
    if (net := shape.delta_net) is not None:
        width = shape.model_dim
        yield matrix(f"{prefix}attn_qkv", net.conv_dim, width)
        yield matrix(f"{prefix}attn_gate", net.value_dim, width)
        yield matrix(f"{prefix}ssm_beta", net.n_value_heads, width)
        yield matrix(f"{prefix}ssm_alpha", net.n_value_heads, width)
        yield vectors(f"{prefix}ssm_conv1d.weight", net.conv_dim, shape.n_conv_taps)
        yield vectors(f"{prefix}ssm_dt.bias", net.n_value_heads)
        yield vectors(f"{prefix}ssm_a", net.n_value_heads)
        yield vectors(f"{prefix}ssm_norm.weight", net.head_dim)
        yield matrix(f"{prefix}ssm_out", width, net.value_dim)
    if (ssm := shape.mamba2) is not None:
        yield matrix(f"{prefix}ssm_in", ssm.inner_dim + ssm.conv_dim + ssm.n_heads, shape.model_dim)
        yield vectors(f"{prefix}ssm_conv1d.weight", ssm.conv_dim, shape.n_conv_taps)
        yield vectors(f"{prefix}ssm_conv1d.bias", ssm.conv_dim)
        yield vectors(f"{prefix}ssm_dt.bias", ssm.n_heads)
        yield vectors(f"{prefix}ssm_a", ssm.n_heads, 1)
        yield vectors(f"{prefix}ssm_d", ssm.n_heads, 1)
        yield vectors(f"{prefix}ssm_norm.weight", ssm.n_groups, ssm.inner_dim // ssm.n_groups)
        yield matrix(f"{prefix}ssm_out", shape.model_dim, ssm.inner_dim)
    if (ssm1 := shape.mamba1) is not None:
        channels, states, rank = ssm1.n_channels, ssm1.state_dim, ssm1.step_rank
        yield matrix(f"{prefix}ssm_in", 2 * channels, shape.model_dim)
        yield vectors(f"{prefix}ssm_conv1d.weight", channels, shape.n_conv_taps)
        yield vectors(f"{prefix}ssm_conv1d.bias", channels)
        yield matrix(f"{prefix}ssm_x", rank + 2 * states, channels)
        yield matrix(f"{prefix}ssm_dt", channels, rank)
        yield vectors(f"{prefix}ssm_dt.bias", channels)
        for name, size in (("dt", rank), ("b", states), ("c", states)):
            yield vectors(f"{prefix}ssm_{name}_norm.weight", size)
        yield vectors(f"{prefix}ssm_a", channels, states)
        yield vectors(f"{prefix}ssm_d", channels)
        yield matrix(f"{prefix}ssm_out", shape.model_dim, channels)
    if (linear := shape.linear) is not None:
        width, kv_dim, mix = shape.model_dim, linear.n_kv_heads * linear.head_dim, "time_mix_"
        for name, *sizes in (
            *(("lerp_x", width), ("lerp_fused", 5, 1, 1, width), ("decay", width)),
            ("w1", 5 * linear.shift_rank, width),
            ("w2", 5, width, linear.shift_rank),
            ("decay_w1", linear.decay_rank, width),
            ("decay_w2", width, linear.decay_rank),
        ):
            yield vectors(f"{prefix}{mix}{name}.weight", *sizes)
        for name, rows in (("receptance", width), ("key", kv_dim), ("value", kv_dim)):
            yield matrix(f"{prefix}{mix}{name}", rows, width)
            yield vectors(f"{prefix}{mix}{name}.bias", rows)
        for name in ("gate", "output"):
            yield matrix(f"{prefix}{mix}{name}", width, width)
    if (time_mix := shape.time_mix) is not None:
        width, mix = shape.model_dim, f"{prefix}time_mix_"
        yield vectors(f"{mix}lerp_fused.weight", 5, 1, 1, width)
        # The first layer has values of another rank, which nobody reads.
        value_rank = time_mix.rate_rank if prefix == "blk.0." else time_mix.value_rank
        for name, rank in (
            ("w", time_mix.decay_rank),
            ("a", time_mix.rate_rank),
            ("v", value_rank),
        ):
            yield vectors(f"{mix}{name}0.weight", width)
            yield vectors(f"{mix}{name}1.weight", rank, width)
            yield vectors(f"{mix}{name}2.weight", width, rank)
        for name in ("k_k", "k_a", "r_k"):
            yield vectors(f"{mix}{name}.weight", width)
        for name in ("receptance", "key", "value", "output"):
            yield matrix(f"{mix}{name}", width, width)


def add_recurrent_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Keys of the recurrent layers, if there are any."""
    if (net := shape.delta_net) is not None:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_uint32(f"{shape.architecture}.full_attention_interval", net.period)
        writer.add_ssm_conv_kernel(shape.n_conv_taps)
        writer.add_ssm_group_count(net.n_key_heads)
        writer.add_ssm_time_step_rank(net.n_value_heads)
        writer.add_ssm_state_size(net.head_dim)
        writer.add_ssm_inner_size(net.value_dim)
    if (ssm := shape.mamba2) is not None:
        writer.add_ssm_conv_kernel(shape.n_conv_taps)
        writer.add_ssm_group_count(ssm.n_groups)
        writer.add_ssm_time_step_rank(ssm.n_heads)
        writer.add_ssm_state_size(ssm.state_dim)
        writer.add_ssm_inner_size(ssm.inner_dim)
        writer.add_rope_scaling_finetuned(False)
    if (ssm1 := shape.mamba1) is not None:
        writer.add_ssm_conv_kernel(shape.n_conv_taps)
        writer.add_ssm_time_step_rank(ssm1.step_rank)
        writer.add_ssm_state_size(ssm1.state_dim)
        writer.add_ssm_inner_size(ssm1.n_channels)
    if (linear := shape.linear) is not None:
        writer.add_wkv_head_size(linear.head_dim)
        writer.add_time_mix_extra_dim(linear.shift_rank)
        writer.add_time_decay_extra_dim(linear.decay_rank)
        writer.add_token_shift_count(1)
    if (time_mix := shape.time_mix) is not None:
        writer.add_wkv_head_size(time_mix.head_dim)
        writer.add_decay_lora_rank(time_mix.decay_rank)
        writer.add_iclr_lora_rank(time_mix.rate_rank)
        writer.add_value_residual_mix_lora_rank(time_mix.value_rank)
        writer.add_gate_lora_rank(0)
        writer.add_token_shift_count(1)

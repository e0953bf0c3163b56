"""Layers with a recurrent state: short convolutions, gated delta nets, Mamba-1 and Mamba-2."""

from __future__ import annotations

from collections.abc import Callable

from gguf import GGUFWriter

from tools.tiny_models.model import DELTA_NET_PERIOD, TinyModel

# Name, rows, columns and standard deviation of a matrix.
Matrix = tuple[str, int, int, float]
EXPERT_SCALE = 2.5
LOG_FLOOR = -5.0  # of decays by row
# Float tensors of two dimensions.
VECTOR_SUFFIXES = (
    ".shortconv.conv.weight",
    ".ssm_conv1d.weight",
    *(f".ssm_conv1d_{name}.weight" for name in "qkv"),
    ".ssm_a",
    ".ssm_d",
    ".ssm_norm.weight",
    ".time_mix_lerp_fused.weight",
    ".channel_mix_lerp_k.weight",
    ".channel_mix_lerp_r.weight",
    ".time_mix_lerp_x.weight",
    ".time_mix_first.weight",
)
# Matrices whose rows are shorter than blocks of 256.
SHORT_ROWS = (".ssm_dt.weight", *(f".time_mix_{name}2.weight" for name in (*"wavg", "decay_w")))


def add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    """Keys of the recurrent layers."""
    family = model.family
    if family.has_short_conv:
        writer.add_shortconv_l_cache(model.n_conv_taps)
    if family.has_delta_net:
        writer.add_uint32(f"{model.architecture}.full_attention_interval", DELTA_NET_PERIOD)
        writer.add_ssm_conv_kernel(model.n_conv_taps)
        writer.add_ssm_group_count(model.n_delta_key_heads)
        writer.add_ssm_time_step_rank(model.n_delta_value_heads)
        writer.add_ssm_state_size(model.delta_head_dim)
        writer.add_ssm_inner_size(model.n_delta_value_heads * model.delta_head_dim)
    if family.has_row_decays:
        writer.add_ssm_conv_kernel(model.n_conv_taps)
        writer.add_uint32(f"{model.architecture}.kda.head_dim", model.delta_head_dim)
        if not family.has_decay_vectors:
            writer.add_bool(f"{model.architecture}.kda.safe_gate", True)
            writer.add_float32(f"{model.architecture}.kda.gate_lower_bound", LOG_FLOOR)
    if family.mamba2 is not None:
        writer.add_ssm_conv_kernel(model.n_conv_taps)
        writer.add_ssm_group_count(0 if family.has_selecting_mamba2 else model.n_ssd_groups)
        writer.add_ssm_time_step_rank(model.n_ssd_heads)
        writer.add_ssm_state_size(model.ssd_state_dim)
        writer.add_ssm_inner_size(model.n_ssd_heads * model.ssd_head_dim)
    if family.has_mamba1:
        writer.add_ssm_conv_kernel(model.n_conv_taps)
        writer.add_ssm_time_step_rank(model.scan_step_rank)
        writer.add_ssm_state_size(model.scan_state_dim)
        writer.add_ssm_inner_size(model.n_scan_channels or 2 * model.model_dim)
    if family.has_rwkv7:
        writer.add_wkv_head_size(model.wkv_head_dim)
        writer.add_decay_lora_rank(model.wkv_decay_rank)
        writer.add_iclr_lora_rank(model.wkv_rate_rank)
        writer.add_value_residual_mix_lora_rank(model.wkv_value_rank)
        writer.add_gate_lora_rank(model.wkv_gate_rank)
    if family.has_rwkv6:
        writer.add_wkv_head_size(model.wkv_head_dim)
        writer.add_time_mix_extra_dim(model.wkv_shift_rank)
        writer.add_time_decay_extra_dim(model.wkv_decay_rank)
        if family.has_shifted_networks:
            writer.add_rescale_every_n_layers(model.rescale_every)
        else:
            writer.add_head_count_kv(model.n_wkv_kv_heads)
    if family.has_plain_networks:
        writer.add_token_shift_count(1)
    if family.has_only_mamba1:
        writer.add_ssm_dt_b_c_rms(model.has_scan_norms)
    if family.mamba2 == "single":
        writer.add_layer_norm_eps(model.norm_eps)
    if family.mamba2 == "single" and family.has_experts:
        writer.add_expert_shared_count(1)
        if model.shared_ffn_dim is None:
            width = max(ffn_dim for _, _, ffn_dim in model.layers)
            writer.add_expert_shared_feed_forward_length(width or model.model_dim)
        writer.add_expert_group_count(1)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(EXPERT_SCALE)


def add_layer(
    normal: Callable[..., None], prefix: str, model: TinyModel, mixer: str
) -> list[Matrix]:
    """Adds the vectors of a layer; returns its matrices."""
    if mixer == "delta_net":
        return _add_delta_net(normal, prefix, model)
    if mixer == "short_conv":
        return _add_short_conv(normal, prefix, model)
    if mixer == "rwkv6":
        return _add_rwkv6(normal, prefix, model)
    if mixer == "rwkv7":
        return _add_rwkv7(normal, prefix, model)
    if mixer == "mamba1":
        return _add_mamba1(normal, prefix, model)
    if mixer == "mamba2" and model.family.has_selecting_mamba2:
        return _add_selecting_mamba2(normal, prefix, model)
    return _add_mamba2(normal, prefix, model) if "mamba2" in mixer else []


def _add_short_conv(normal: Callable[..., None], prefix: str, model: TinyModel) -> list[Matrix]:
    width = model.model_dim
    normal(f"{prefix}shortconv.conv.weight", width, model.n_conv_taps, std=0.6)
    return [
        ("shortconv.in_proj", 3 * width, width, 1.2 * width**-0.5),
        ("shortconv.out_proj", width, width, width**-0.5),
    ]


def _add_delta_net(normal: Callable[..., None], prefix: str, model: TinyModel) -> list[Matrix]:
    if model.family.has_row_decays:
        return _add_row_decays(normal, prefix, model)
    heads, width = model.n_delta_value_heads, model.model_dim
    value_dim = heads * model.delta_head_dim
    conv_dim = value_dim + 2 * model.n_delta_key_heads * model.delta_head_dim
    normal(f"{prefix}ssm_conv1d.weight", conv_dim, model.n_conv_taps, std=0.6)
    normal(f"{prefix}ssm_dt.bias", heads, std=0.5, mean=-1.0)
    normal(f"{prefix}ssm_a", heads, std=0.1, mean=-0.4)
    normal(f"{prefix}ssm_norm.weight", model.delta_head_dim, std=0.1, mean=1.0)
    std = width**-0.5
    gates = [("ssm_beta", heads, width, std), ("ssm_alpha", heads, width, std)]
    if model.family.has_grouped_heads:
        gates = [("ssm_ba", 2 * heads, width, std)]
    return [
        ("attn_qkv", conv_dim, width, std),
        ("attn_gate", value_dim, width, std),
        *gates,
        ("ssm_out", width, value_dim, value_dim**-0.5),
    ]


def _add_row_decays(normal: Callable[..., None], prefix: str, model: TinyModel) -> list[Matrix]:
    heads, width = int(model.layers[0][0]), model.model_dim
    inner = heads * model.delta_head_dim
    for name in "qkv":
        normal(f"{prefix}ssm_conv1d_{name}.weight", 1, inner, 1, model.n_conv_taps, std=0.6)
    normal(f"{prefix}ssm_dt.bias", inner, std=0.5, mean=-3.0)
    has_vectors, rank = model.family.has_decay_vectors, model.delta_head_dim
    if has_vectors:  # as llama.cpp's converter writes it
        normal(f"{prefix}ssm_a", 1, heads, 1, std=0.1, mean=-1.0)
    else:
        normal(f"{prefix}ssm_a", heads, 1, std=0.1, mean=1.0)
    normal(f"{prefix}ssm_norm.weight", model.delta_head_dim, std=0.1, mean=1.0)
    std = width**-0.5
    gates = [(f"ssm_{name}_a", rank if has_vectors else inner, width, std) for name in "fg"]
    if has_vectors:
        gates += [(f"ssm_{name}_b", inner, rank, rank**-0.5) for name in "fg"]
    return [
        *((f"attn_{name}", inner, width, std) for name in "qkv"),
        *gates,
        ("ssm_beta", heads, width, std),
        ("attn_output", width, inner, inner**-0.5),
    ]


def _add_mamba2(normal: Callable[..., None], prefix: str, model: TinyModel) -> list[Matrix]:
    heads, groups, width = model.n_ssd_heads, model.n_ssd_groups, model.model_dim
    inner = heads * model.ssd_head_dim
    conv_dim = inner + 2 * groups * model.ssd_state_dim
    normal(f"{prefix}ssm_conv1d.weight", conv_dim, model.n_conv_taps, std=0.6)
    normal(f"{prefix}ssm_conv1d.bias", conv_dim, std=0.2)
    normal(f"{prefix}ssm_dt.bias", heads, std=0.7, mean=-2.0)
    normal(f"{prefix}ssm_a", heads, 1, std=0.1, mean=-0.5)
    normal(f"{prefix}ssm_d", heads, 1, std=0.5, mean=1.0)
    if model.has_ssm_norm:
        normal(f"{prefix}ssm_norm.weight", groups, inner // groups, std=0.1, mean=1.0)
    return [
        ("ssm_in", inner + conv_dim + heads, width, width**-0.5),
        ("ssm_out", width, inner, inner**-0.5),
    ]


def _add_selecting_mamba2(
    normal: Callable[..., None], prefix: str, model: TinyModel
) -> list[Matrix]:
    heads, states, width = model.n_ssd_heads, model.ssd_state_dim, model.model_dim
    inner, rank = heads * model.ssd_head_dim, max(64, width // 16)
    normal(f"{prefix}ssm_conv1d.weight", inner, model.n_conv_taps, std=0.6)
    normal(f"{prefix}ssm_dt.bias", heads, std=0.7, mean=-2.0)
    normal(f"{prefix}ssm_a", heads, std=0.1, mean=-0.5)
    normal(f"{prefix}ssm_d", heads, std=0.5, mean=1.0)
    for name, size in (("dt", rank), ("b", states), ("c", states)):
        normal(f"{prefix}ssm_{name}_norm", size, std=0.1, mean=1.0)
    return [
        ("ssm_in", 2 * inner, width, width**-0.5),
        ("ssm_x", 2 * states + rank, inner, inner**-0.5),
        ("ssm_dt", heads, rank, rank**-0.5),
        ("ssm_out", width, inner, inner**-0.5),
    ]


def _add_mamba1(normal: Callable[..., None], prefix: str, model: TinyModel) -> list[Matrix]:
    width, states, rank = model.model_dim, model.scan_state_dim, model.scan_step_rank
    channels = model.n_scan_channels or 2 * width
    normal(f"{prefix}ssm_conv1d.weight", channels, model.n_conv_taps, std=0.6)
    normal(f"{prefix}ssm_conv1d.bias", channels, std=0.2)
    normal(f"{prefix}ssm_dt.bias", channels, std=0.7, mean=-2.0)
    normal(f"{prefix}ssm_a", channels, states, std=0.1, mean=-0.5)
    normal(f"{prefix}ssm_d", channels, std=0.5, mean=1.0)
    norms = (("dt", rank), ("b", states), ("c", states))
    for name, size in () if model.family.has_only_mamba1 else norms:
        normal(f"{prefix}ssm_{name}_norm.weight", size, std=0.1, mean=1.0)
    return [
        ("ssm_in", 2 * channels, width, width**-0.5),
        ("ssm_x", rank + 2 * states, channels, channels**-0.5),
        ("ssm_dt", channels, rank, rank**-0.5),
        ("ssm_out", width, channels, channels**-0.5),
    ]


def _add_rwkv6(normal: Callable[..., None], prefix: str, model: TinyModel) -> list[Matrix]:
    width, mix, head_dim = model.model_dim, f"{prefix}time_mix_", model.wkv_head_dim
    shift_rank, decay_rank = model.wkv_shift_rank, model.wkv_decay_rank
    is_shifted = model.family.has_shifted_networks
    n_kv_heads = 0 if is_shifted else model.n_wkv_kv_heads
    kv_dim = n_kv_heads * head_dim or width
    normal(f"{mix}lerp_x.weight", width, std=0.3, mean=0.5)
    normal(f"{mix}lerp_fused.weight", 5, 1, 1, width, std=0.3, mean=0.5)
    if is_shifted:
        for name in "kr":
            normal(f"{prefix}channel_mix_lerp_{name}.weight", width, std=0.3, mean=0.5)
    normal(f"{mix}w2.weight", 5, width, shift_rank, std=0.5 * shift_rank**-0.5)
    normal(f"{mix}decay.weight", width, std=1.0, mean=-2.0)
    if is_shifted:
        normal(f"{mix}first.weight", width // head_dim, head_dim, std=0.3, mean=0.5)
        normal(f"{mix}ln.weight", width, std=0.1, mean=1.0)
        normal(f"{mix}ln.bias", width, std=0.2)
    elif model.has_wkv_biases:
        for name, size in (("receptance", width), ("key", kv_dim), ("value", kv_dim)):
            normal(f"{mix}{name}.bias", size, std=0.2)
    ffn_dim = int(model.layers[0][2])
    network = [
        ("channel_mix_key", ffn_dim, width, width**-0.5),
        ("channel_mix_value", width, ffn_dim, ffn_dim**-0.5),
        ("channel_mix_receptance", width, width, width**-0.5),
    ]
    return [
        ("time_mix_w1", 5 * shift_rank, width, width**-0.5),
        ("time_mix_decay_w1", decay_rank, width, width**-0.5),
        ("time_mix_decay_w2", width, decay_rank, decay_rank**-0.5),
        *(
            (f"time_mix_{name}", rows, width, width**-0.5)
            for name, rows in (
                *(("receptance", width), ("key", kv_dim), ("value", kv_dim)),
                *(("gate", width), ("output", width)),
            )
        ),
        *(network if is_shifted else []),
    ]


def _add_rwkv7(normal: Callable[..., None], prefix: str, model: TinyModel) -> list[Matrix]:
    """The first layer has matrices of values that nobody reads, as converters write them."""
    width, mix = model.model_dim, f"{prefix}time_mix_"
    is_first = prefix == "blk.0."
    value_rank = model.wkv_rate_rank if is_first else model.wkv_value_rank
    is_shifted, gate_rank = model.family.has_shifted_networks, model.wkv_gate_rank
    normal(f"{mix}lerp_fused.weight", 6 if gate_rank else 5, 1, 1, width, std=0.3, mean=0.5)
    if is_shifted:
        normal(f"{prefix}channel_mix_lerp_k.weight", 1, 1, width, std=0.3, mean=0.5)
    for name, mean, std in (
        *(("w0", -1.0, 1.0), ("a0", 0.0, 0.5), ("v0", 0.5, 0.5)),
        *(("k_k", 0.8, 0.2), ("k_a", 1.0, 0.2), ("r_k", 0.0, 0.3)),
    ):
        normal(f"{mix}{name}.weight", width, std=std, mean=mean)
    if is_shifted or model.has_wkv_norms:
        normal(f"{mix}ln.weight", width, std=0.1, mean=1.0)
        normal(f"{mix}ln.bias", width, std=0.2)
    ranks = {
        "w": model.wkv_decay_rank,
        "a": model.wkv_rate_rank,
        "v": value_rank,
        **({"g": gate_rank} if gate_rank else {}),
    }
    ffn_dim = int(model.layers[0][2])
    network = [
        ("channel_mix_key", ffn_dim, width, width**-0.5),
        ("channel_mix_value", width, ffn_dim, ffn_dim**-0.5),
    ]
    return [
        *((f"time_mix_{name}1", rank, width, width**-0.5) for name, rank in ranks.items()),
        *((f"time_mix_{name}2", width, rank, rank**-0.5) for name, rank in ranks.items()),
        *(
            (f"time_mix_{name}", width, width, width**-0.5)
            for name in ("receptance", "key", "value", "output")
        ),
        *(network if is_shifted else []),
    ]

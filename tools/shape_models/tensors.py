"""The tensors of a file in the shape of a model: names, shapes, and the types of mixtures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from tools.shape_models import mixed_streams
from tools.shape_models.encoders import encoder_tensors
from tools.shape_models.experts import expert_tensors
from tools.shape_models.recurrent import recurrent_tensors
from tools.shape_models.shape import Shape
from tools.shape_models.tensor import Tensor
from tools.tiny_models.gemma3n import LAUREL_RANK, N_STREAMS, STACKS

# Type of the matrices of a file type, and of those that llama-quantize gives more bits.
FILE_TYPES: Mapping[str, tuple[str, str]] = {
    "Q2_K": ("Q2_K", "Q3_K"),
    "Q4_0": ("Q4_0", "Q4_0"),
    "Q4_1": ("Q4_1", "Q4_1"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K"),
    "Q8_0": ("Q8_0", "Q8_0"),
    "F16": ("F16", "F16"),
    "MXFP4_MOE": ("Q8_0", "Q8_0"),
}
IN_ALL_LAYERS = ("Q2_K",)  # the better type goes to every layer, and to attn_output too
EXPERT_TYPES = {"MXFP4_MOE": "MXFP4"}  # of the experts' matrices, where it is another one
OUTPUT_TYPE = "Q6_K"  # of the output matrix where the others have fewer bits
# What takes the place of a type whose blocks of 256 do not divide the rows.
NARROW_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0"}


def has_more_bits(layer: int, n_layers: int) -> bool:
    """Whether mixtures give ffn_down and attn_v of a layer the better type (llama-quantize)."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def shape_tensors(shape: Shape, file_type: str, vocab_size: int) -> Iterator[Tensor]:
    """The tensors of a file, in its order."""
    usual, better = FILE_TYPES[file_type]

    def fitting(type_name: str, cols: int) -> str:
        block_size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
        return type_name if cols % block_size == 0 else NARROW_ROWS[type_name]

    def matrix(name: str, rows: int, cols: int, type_name: str = usual) -> Tensor:
        return Tensor(f"{name}.weight", (rows, cols), fitting(type_name, cols))

    def vectors(name: str, *sizes: int) -> Tensor:
        return Tensor(name, sizes, "F32")

    width, gemma4 = shape.model_dim, shape.gemma4
    if shape.encoder is not None:
        yield from encoder_tensors(shape, vocab_size, matrix, vectors)
        return
    output_type = usual if usual in ("Q8_0", "F16") else OUTPUT_TYPE
    has_streams = gemma4 is not None and gemma4.has_streams
    if shape.rope_factor is not None or (gemma4 is not None and not has_streams):
        yield vectors("rope_freqs.weight", shape.head_dim // 2)
    if gemma4 is not None:
        inputs = shape.n_layers * gemma4.token_input_dim
        yield matrix("per_layer_token_embd", vocab_size, inputs, usual)
        yield matrix("per_layer_model_proj", inputs, width, "F16")
        yield vectors("per_layer_proj_norm.weight", gemma4.token_input_dim)
    if has_streams:
        for name in STACKS:
            yield Tensor(name, (N_STREAMS - 1, width, width), "F16")
    yield matrix("token_embd", vocab_size, width, output_type if shape.tied else usual)
    if not shape.tied:
        yield matrix("output", vocab_size, width, output_type)
    mamba = shape.mamba2 or shape.mamba1
    is_lfm2 = bool(shape.attention_layers) and mamba is None
    streams = shape.mixed_streams
    if streams is not None:
        n_rows, n_heads = streams.ngram_rows * streams.n_ngram_heads, streams.n_ngram_heads
        yield matrix("per_layer_token_embd", n_rows, width // n_heads, "Q8_0")
        yield from mixed_streams.mixer_tensors("output_hc", shape, streams, matrix, vectors)
    else:
        yield vectors(f"{'token_embd' if is_lfm2 else 'output'}_norm.weight", width)
    for layer in range(shape.n_layers + shape.n_drafting_layers):
        prefix = f"blk.{layer}."
        if layer >= shape.n_layers:
            yield matrix(f"{prefix}nextn.eh_proj", width, 2 * width)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                yield vectors(f"{prefix}nextn.{name}.weight", width)
        head_dim, ffn_dim, has_keys = shape.layer_sizes(layer)
        q_dim, kv_dim = shape.n_heads * head_dim, shape.n_kv_heads * head_dim
        is_whole = file_type in IN_ALL_LAYERS
        mixed = better if is_whole or has_more_bits(layer, shape.n_layers) else usual
        if streams is not None:
            yield from mixed_streams.layer_tensors(prefix, shape, streams, layer, matrix, vectors)
        else:
            yield vectors(f"{prefix}attn_norm.weight", width)
        if (
            shape.delta_net or mamba or shape.linear or shape.time_mix
        ) is not None and not shape.attends(layer):
            yield from recurrent_tensors(prefix, shape, matrix, vectors)
        elif not shape.attends(layer):
            yield matrix(f"{prefix}shortconv.in_proj", 3 * width, width)
            yield Tensor(f"{prefix}shortconv.conv.weight", (width, shape.n_conv_taps), "F32")
            yield matrix(f"{prefix}shortconv.out_proj", width, width)
        for name, rows, type_name in (
            ("q", q_dim if shape.delta_net is None else 2 * q_dim, usual),
            ("k", kv_dim, usual),
            ("v", kv_dim, mixed),
        ):
            if not shape.attends(layer) or (name != "q" and not has_keys):
                continue
            yield matrix(f"{prefix}attn_{name}", rows, width, type_name)
            if shape.qkv_biases:
                yield vectors(f"{prefix}attn_{name}.bias", rows)
            if shape.qk_norms and name != "v":
                n_normed = rows if shape.qk_norms == "projection" else head_dim
                yield vectors(f"{prefix}attn_{name}_norm.weight", n_normed)
        if shape.attends(layer):
            yield matrix(f"{prefix}attn_output", width, q_dim, better if is_whole else usual)
        if shape.window is not None:
            yield vectors(f"{prefix}attn_output.bias", width)
            yield vectors(f"{prefix}attn_sinks.weight", shape.n_heads)
        is_renamed = (shape.delta_net or shape.window) is not None
        if streams is None:
            yield vectors(
                f"{prefix}{'post_attention_norm' if is_renamed else 'ffn_norm'}.weight", width
            )
        if shape.experts is not None:
            own = EXPERT_TYPES.get(file_type)
            types = fitting(own or usual, width), fitting(own or mixed, ffn_dim)
            yield from expert_tensors(prefix, shape, shape.experts, types, vectors)
            continue
        yield matrix(f"{prefix}ffn_gate", ffn_dim, width)
        yield matrix(f"{prefix}ffn_up", ffn_dim, width)
        yield matrix(f"{prefix}ffn_down", width, ffn_dim, mixed)
        if gemma4 is not None:
            for name in ("post_attention_norm", "post_ffw_norm", "post_norm"):
                yield vectors(f"{prefix}{name}.weight", width)
            yield matrix(f"{prefix}inp_gate", gemma4.token_input_dim, width)
            yield matrix(f"{prefix}proj", width, gemma4.token_input_dim)
            if not has_streams:
                yield vectors(f"{prefix}layer_output_scale.weight", 1)
        if has_streams:
            for name in ("altup_correct_scale", "altup_router_norm", "laurel_post_norm"):
                yield vectors(f"{prefix}{name}.weight", width)
            yield vectors(f"{prefix}altup_correct_coef.weight", N_STREAMS, N_STREAMS)
            yield vectors(f"{prefix}altup_predict_coef.weight", N_STREAMS**2, N_STREAMS)
            yield matrix(f"{prefix}altup_router", N_STREAMS, width, "F16")
            yield matrix(f"{prefix}laurel_l", LAUREL_RANK, width, "F16")
            yield matrix(f"{prefix}laurel_r", width, LAUREL_RANK, "F16")

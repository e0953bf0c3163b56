"""Writes a GGUF file of random weights in the shape of a real model, for measuring speed.

    python -m tools.make_shape_model llama-3.2-1b Q4_K_M model.gguf

The quantised blocks are random bytes with scales that give weights of a standard deviation of
about 0.02: every speed is that of the real model, the answers mean nothing. Which tensors of a
mixture have which type is what llama-quantize chooses. The tokenizer, and with it the size of
the vocabulary, is another file's. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from edgeh2o.errors import EdgeH2OError
from edgeh2o.formats.model_cache import resolve_model
from tools.shape_recurrent import DeltaNet, Mamba2
from tools.tiny_models.gemma3n import (
    CUTOFF,
    LAUREL_RANK,
    N_CUT_LAYERS,
    N_STREAMS,
    STACKS,
    VECTOR_SUFFIXES,
)
from tools.tiny_models.rope import llama3_factors

DEFAULT_TOKENIZER = "smollm2-135m"
WEIGHT_STD = 0.02

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4:
    """Windows, the size of heads in layers with one, and inputs of layers per token.

    The last ``n_shared_kv`` layers read the keys and values of others and are twice as wide, but
    for Gemma 3n (``has_streams``), which has AltUp, LAuReL and gates that are cut off instead.
    """

    window: int
    window_period: int
    head_dim_sliding: int
    n_shared_kv: int
    token_input_dim: int
    has_streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and settings of a model.

    Attributes:
        rope_factor: of the scaling of Llama 3.1, from ``trained_context`` tokens; None for none.
        tied: the token embedding is also the output matrix.
        qk_norms: queries and keys are normed per head.
        qkv_biases: Q, K and V have biases.
        gemma4: what Gemma 3n and 4 have beside these; their other norms, and scales of layers.
        attention_layers: the others have a convolution of ``n_conv_taps`` tokens; empty for all.
        delta_net: what Qwen3.5 has in most layers; its attention has a gate.
        mamba2: what the layers without attention have in Granite 4.0 H, which has no positions.
        rotary_dim: rotated elements of a head; None for all.
    """

    architecture: str
    n_layers: int
    model_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    context_length: int
    rope_base: float
    norm_epsilon: float
    tied: bool
    rope_factor: float | None = None
    trained_context: int = 8192
    qk_norms: bool = False
    qkv_biases: bool = False
    gemma4: Gemma4 | None = None
    attention_layers: tuple[int, ...] = ()
    n_conv_taps: int = 0
    delta_net: DeltaNet | None = None
    mamba2: Mamba2 | None = None
    rotary_dim: int | None = None

    def attends(self, layer: int) -> bool:
        if self.delta_net is not None:
            return (layer + 1) % self.delta_net.period == 0
        return not self.attention_layers or layer in self.attention_layers

    def layer_sizes(self, layer: int) -> tuple[int, int, bool]:
        """Head size and feed-forward width of a layer, and whether it has keys of its own."""
        if self.gemma4 is None:
            return self.head_dim, self.ffn_dim, True
        has_keys = layer < self.n_layers - self.gemma4.n_shared_kv
        if self.gemma4.has_streams:  # files have keys for all
            return self.head_dim, self.ffn_dim, True
        head_dim = self.gemma4.head_dim_sliding if self.has_window(layer) else self.head_dim
        return head_dim, self.ffn_dim if has_keys else 2 * self.ffn_dim, has_keys

    def has_window(self, layer: int) -> bool:
        return self.gemma4 is not None and (layer + 1) % self.gemma4.window_period != 0


# From the configurations that the models were published with.
SHAPES: Mapping[str, Shape] = {
    "qwen2.5-0.5b": Shape(
        architecture="qwen2",
        n_layers=24,
        model_dim=896,
        n_heads=14,
        n_kv_heads=2,
        head_dim=64,
        ffn_dim=4864,
        context_length=32768,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=True,
        qkv_biases=True,
    ),
    "llama-3.2-1b": Shape(
        architecture="llama",
        n_layers=16,
        model_dim=2048,
        n_heads=32,
        n_kv_heads=8,
        head_dim=64,
        ffn_dim=8192,
        context_length=131072,
        rope_base=5e5,
        norm_epsilon=1e-5,
        tied=True,
        rope_factor=32.0,
    ),
    "qwen3-1.7b": Shape(
        architecture="qwen3",
        n_layers=28,
        model_dim=2048,
        n_heads=16,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=6144,
        context_length=40960,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=True,
        qk_norms=True,
    ),
    "smollm3-3b": Shape(
        architecture="smollm3",
        n_layers=36,
        model_dim=2048,
        n_heads=16,
        n_kv_heads=4,
        head_dim=128,
        ffn_dim=11008,
        context_length=65536,
        rope_base=5e6,
        norm_epsilon=1e-6,
        tied=True,
    ),
    "gemma-3n-e2b": Shape(
        architecture="gemma3n",
        n_layers=30,
        model_dim=2048,
        n_heads=8,
        n_kv_heads=2,
        head_dim=256,
        ffn_dim=8192,
        context_length=32768,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=True,
        qk_norms=True,
        gemma4=Gemma4(
            window=512,
            window_period=5,
            head_dim_sliding=256,
            n_shared_kv=10,
            token_input_dim=256,
            has_streams=True,
        ),
    ),
    "gemma-4-e2b": Shape(
        architecture="gemma4",
        n_layers=35,
        model_dim=1536,
        n_heads=8,
        n_kv_heads=1,
        head_dim=512,
        ffn_dim=6144,
        context_length=131072,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=True,
        qk_norms=True,
        gemma4=Gemma4(
            window=512, window_period=5, head_dim_sliding=256, n_shared_kv=20, token_input_dim=256
        ),
    ),
    "lfm2-1.2b": Shape(
        architecture="lfm2",
        n_layers=16,
        model_dim=2048,
        n_heads=32,
        n_kv_heads=8,
        head_dim=64,
        ffn_dim=8192,
        context_length=128000,
        rope_base=1e6,
        norm_epsilon=1e-5,
        tied=True,
        qk_norms=True,
        attention_layers=(2, 5, 8, 10, 12, 14),
        n_conv_taps=3,
    ),
    "qwen3.5-2b": Shape(
        architecture="qwen35",
        n_layers=24,
        model_dim=2048,
        n_heads=8,
        n_kv_heads=2,
        head_dim=256,
        ffn_dim=6144,
        context_length=262144,
        rope_base=1e7,
        norm_epsilon=1e-6,
        tied=True,
        qk_norms=True,
        n_conv_taps=4,
        delta_net=DeltaNet(period=4, n_key_heads=16, n_value_heads=16, head_dim=128),
        rotary_dim=64,
    ),
    "granite-4.0-h-1b": Shape(
        architecture="granitehybrid",
        n_layers=40,
        model_dim=1536,
        n_heads=12,
        n_kv_heads=4,
        head_dim=128,
        ffn_dim=4096,
        context_length=131072,
        rope_base=1e4,
        norm_epsilon=1e-5,
        tied=True,
        attention_layers=(5, 15, 25, 35),
        n_conv_taps=4,
        mamba2=Mamba2(n_heads=48, head_dim=64, n_groups=1, state_dim=128),
    ),
    "llama-3.1-8b": Shape(
        architecture="llama",
        n_layers=32,
        model_dim=4096,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=14336,
        context_length=131072,
        rope_base=5e5,
        norm_epsilon=1e-5,
        tied=False,
        rope_factor=8.0,
    ),
}

# Type of the matrices of a file type, and of those that llama-quantize gives more bits.
FILE_TYPES: Mapping[str, tuple[str, str]] = {
    "Q4_0": ("Q4_0", "Q4_0"),
    "Q4_1": ("Q4_1", "Q4_1"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K"),
    "Q8_0": ("Q8_0", "Q8_0"),
    "F16": ("F16", "F16"),
}
OUTPUT_TYPE = "Q6_K"  # of the output matrix where the others have fewer bits
# What takes the place of a type whose blocks of 256 do not divide the rows.
NARROW_ROWS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def has_more_bits(layer: int, n_layers: int) -> bool:
    """Whether mixtures give ffn_down and attn_v of a layer the better type (llama-quantize)."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: its name, its shape ([rows, cols] or [n]) and the name of its type."""

    name: str
    shape: tuple[int, ...]
    type_name: str

    @property
    def n_bytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type_name]]
        return int(np.prod(self.shape)) // block_size * block_bytes


def shape_tensors(shape: Shape, file_type: str, vocab_size: int) -> Iterator[Tensor]:
    """The tensors of a file, in its order."""
    usual, better = FILE_TYPES[file_type]

    def matrix(name: str, rows: int, cols: int, type_name: str = usual) -> Tensor:
        block_size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
        fits = cols % block_size == 0
        return Tensor(f"{name}.weight", (rows, cols), type_name if fits else NARROW_ROWS[type_name])

    def vectors(name: str, *sizes: int) -> Tensor:
        return Tensor(name, sizes, "F32")

    width, gemma4 = shape.model_dim, shape.gemma4
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
    is_lfm2 = bool(shape.attention_layers) and shape.mamba2 is None
    yield vectors(f"{'token_embd' if is_lfm2 else 'output'}_norm.weight", width)
    for layer in range(shape.n_layers):
        prefix = f"blk.{layer}."
        head_dim, ffn_dim, has_keys = shape.layer_sizes(layer)
        q_dim, kv_dim = shape.n_heads * head_dim, shape.n_kv_heads * head_dim
        mixed = better if has_more_bits(layer, shape.n_layers) else usual
        yield vectors(f"{prefix}attn_norm.weight", width)
        recurrent = shape.delta_net or shape.mamba2
        if recurrent is not None and not shape.attends(layer):
            yield from recurrent.tensors(prefix, shape, matrix, vectors)
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
                yield vectors(f"{prefix}attn_{name}_norm.weight", head_dim)
        if shape.attends(layer):
            yield matrix(f"{prefix}attn_output", width, q_dim)
        norm = "ffn_norm" if shape.delta_net is None else "post_attention_norm"
        yield vectors(f"{prefix}{norm}.weight", width)
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


def _half(value: float) -> Bytes:
    return np.array([value], np.float16).view(np.uint8)


def random_blocks(n_bytes: int, type_name: str, source: np.random.BitGenerator) -> Bytes:
    """Blocks of a quantised type or F16 that decode to weights of mean 0 and std WEIGHT_STD.

    Args:
        n_bytes: a whole number of blocks.

    Returns:
        [blocks, bytes of a block]. Numbers of steps are uniform; the factors of the scales
        below are the standard deviations that they have then.
    """
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    words = source.random_raw((n_bytes + 7) // 8)
    blocks = np.asarray(words).view(np.uint8)[:n_bytes].reshape(-1, block_bytes)
    if type_name == "F16":
        # Any sign and mantissa, one of the two exponents that reach up to 2**-5.
        bits = blocks.view(np.uint16)
        bits &= 0x87FF
        bits |= 8 << 10
    elif type_name == "Q6_K":
        blocks[:, 208:] = _half(WEIGHT_STD / (73.9 * 18.5))
    elif type_name in ("Q4_K", "Q5_K"):
        # Each sub-block's minimum is its scale, which `dmin` makes the middle of the steps.
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
        middle, std = (7.5, 4.61) if type_name == "Q4_K" else (15.5, 9.23)
        d = WEIGHT_STD / (36.5 * std)
        blocks[:, :2], blocks[:, 2:4] = _half(d), _half(middle * d)
    elif type_name in ("Q4_1", "Q5_1"):
        middle, std = (7.5, 4.61) if type_name == "Q4_1" else (15.5, 9.23)
        d = WEIGHT_STD / std
        blocks[:, :2], blocks[:, 2:4] = _half(d), _half(-middle * d)
    else:
        # Steps are centred at -0.5: a random sign of the scale takes the mean away.
        low, high = _half(WEIGHT_STD / {"Q4_0": 4.63, "Q5_0": 9.25, "Q8_0": 73.9}[type_name])
        blocks[:, 0] = low
        blocks[:, 1] = (blocks[:, 1] & 0x80) | high
    return blocks


def _values(
    tensor: Tensor, shape: Shape, source: np.random.BitGenerator
) -> Bytes | NDArray[np.float32]:
    if tensor.type_name != "F32":
        return random_blocks(tensor.n_bytes, tensor.type_name, source)
    if tensor.name == "rope_freqs.weight" and shape.gemma4 is not None:
        n_pairs = shape.head_dim // 2  # a quarter of them is rotated
        return np.where(np.arange(n_pairs) < n_pairs // 4, 1.0, 1e30).astype(np.float32)
    if tensor.name == "rope_freqs.weight":
        assert shape.rope_factor is not None
        return llama3_factors(
            rope_base=shape.rope_base,
            n_pairs=shape.head_dim // 2,
            trained_context=shape.trained_context,
            factor=shape.rope_factor,
        )
    noise = np.random.Generator(source).normal(scale=0.05, size=tensor.shape)
    if tensor.name.endswith(VECTOR_SUFFIXES):
        return noise.astype(np.float32)
    if tensor.name.endswith(".ssm_a"):  # of the logarithm of what decays
        return (noise - 0.5).astype(np.float32)
    return (noise + (not tensor.name.endswith(".bias"))).astype(np.float32)


def write_shape_model(
    path: Path | str,
    shape: str | Shape,
    file_type: str,
    *,
    tokenizer_from: Path | str = DEFAULT_TOKENIZER,
    n_layers: int | None = None,
    seed: int = 0,
) -> Path:
    """Writes the file, one tensor in memory at a time; returns its path.

    Args:
        shape: one of SHAPES by its name, or sizes of your own.
        file_type: one of FILE_TYPES.
        tokenizer_from: a GGUF file, or the name of a known model.
        n_layers: how many layers to write; None for all.

    Raises:
        ValueError: for another shape, type or number of layers.
        ResourceError: if the file of the tokenizer is not there.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"{shape} is not one of {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    if file_type not in FILE_TYPES:
        raise ValueError(f"{file_type} is not one of {', '.join(FILE_TYPES)}")
    if n_layers is not None:
        if not 1 <= n_layers <= shape.n_layers:
            raise ValueError(f"the number of layers is 1 to {shape.n_layers}")
        if (gemma4 := shape.gemma4) is not None:
            n_shared = max(0, n_layers - (shape.n_layers - gemma4.n_shared_kv))
            shape = replace(shape, gemma4=replace(gemma4, n_shared_kv=n_shared))
        shape = replace(shape, n_layers=n_layers)
    path = Path(path)
    writer = GGUFWriter(path, shape.architecture)
    vocab_size = _copy_tokenizer(writer, resolve_model(tokenizer_from))
    _add_metadata(writer, shape, vocab_size)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{file_type}"])
    tensors = list(shape_tensors(shape, file_type, vocab_size))
    for tensor in tensors:
        raw_type = GGMLQuantizationType[tensor.type_name]
        # A dtype other than uint8 says that the shape counts values and not bytes.
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.n_bytes, raw_type)
    source = np.random.SFC64(seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(_values(tensor, shape, source))
    writer.close()
    return path


def _copy_tokenizer(writer: GGUFWriter, path: Path) -> int:
    """Copies the metadata of a file's tokenizer; returns the number of its tokens."""
    fields = GGUFReader(path).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    return len(fields["tokenizer.ggml.tokens"].data)


def _add_metadata(writer: GGUFWriter, shape: Shape, vocab_size: int) -> None:
    writer.add_name("random weights")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.model_dim)
    sizes = [shape.layer_sizes(layer) for layer in range(shape.n_layers)]
    widths = [ffn_dim for _, ffn_dim, _ in sizes]
    writer.add_feed_forward_length(widths if len(set(widths)) > 1 else shape.ffn_dim)
    writer.add_head_count(shape.n_heads)
    if shape.attention_layers:
        if shape.mamba2 is None:
            writer.add_shortconv_l_cache(shape.n_conv_taps)
        kv_heads = [shape.n_kv_heads * shape.attends(layer) for layer in range(shape.n_layers)]
        writer.add_head_count_kv(kv_heads)
    else:
        writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.rotary_dim or shape.head_dim)
    if (recurrent := shape.delta_net or shape.mamba2) is not None:
        recurrent.add_metadata(writer, shape)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_vocab_size(vocab_size)
    if (gemma4 := shape.gemma4) is None:
        return
    writer.add_sliding_window(gemma4.window)
    writer.add_sliding_window_pattern([shape.has_window(i) for i in range(shape.n_layers)])
    writer.add_rope_freq_base_swa(1e4)
    writer.add_final_logit_softcapping(30.0)
    numbers = {
        "attention.shared_kv_layers": gemma4.n_shared_kv,
        "embedding_length_per_layer_input": gemma4.token_input_dim,
    }
    if gemma4.has_streams:
        writer.add_altup_active_idx(0)
        writer.add_altup_num_inputs(N_STREAMS)
        cutoffs = [CUTOFF if i < N_CUT_LAYERS else -np.inf for i in range(shape.n_layers)]
        writer.add_activation_sparsity_scale(cutoffs)
    else:
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            numbers[f"{key}_swa"] = gemma4.head_dim_sliding
    for key, value in numbers.items():
        writer.add_uint32(f"{shape.architecture}.{key}", value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make_shape_model", description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file_type", choices=FILE_TYPES)
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument(
        "--tokenizer-from",
        default=DEFAULT_TOKENIZER,
        metavar="FILE",
        help=f"GGUF file, or name of a known model, whose tokenizer is taken ({DEFAULT_TOKENIZER})",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="write the first N layers only")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args(arguments)
    try:
        write_shape_model(
            options.path,
            options.shape,
            options.file_type,
            tokenizer_from=options.tokenizer_from,
            n_layers=options.layers,
            seed=options.seed,
        )
    except (OSError, ValueError, EdgeH2OError) as error:
        print(f"make_shape_model: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

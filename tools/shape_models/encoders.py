"""Tensors and settings of models that make vectors and write none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gguf import GGUFWriter, PoolingType

from tools.shape_models.shape import Encoder, Shape
from tools.shape_models.tensor import Tensor

MatrixOf = Callable[..., Tensor]
VectorsOf = Callable[..., Tensor]
N_TOKEN_TYPES = 2


def encoder_tensors(
    shape: Shape, vocab_size: int, matrix: MatrixOf, vectors: VectorsOf
) -> Iterator[Tensor]:
    """All tensors of a file, in its order."""
    width, is_gemma = shape.model_dim, shape.architecture == "gemma-embedding"
    q_dim, kv_dim = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim

    def norm(name: str) -> Iterator[Tensor]:
        yield vectors(f"{name}.weight", width)
        if not is_gemma:
            yield vectors(f"{name}.bias", width)

    yield matrix("token_embd", vocab_size, width)
    if is_gemma:
        yield from norm("output_norm")
    else:
        yield vectors("token_types.weight", N_TOKEN_TYPES, width)
        yield from norm("token_embd_norm")
    if shape.architecture == "bert":
        yield vectors("position_embd.weight", shape.context_length, width)
    for layer in range(shape.n_layers):
        prefix = f"blk.{layer}."
        for name, rows, cols in (
            ("attn_q", q_dim, width),
            ("attn_k", kv_dim, width),
            ("attn_v", kv_dim, width),
            ("attn_output", width, q_dim),
            ("ffn_gate", shape.ffn_dim, width),
            ("ffn_up", shape.ffn_dim, width),
            ("ffn_down", width, shape.ffn_dim),
        ):
            if shape.architecture == "bert" and name == "ffn_gate":
                continue
            yield matrix(f"{prefix}{name}", rows, cols)
            if shape.architecture == "bert":
                yield vectors(f"{prefix}{name}.bias", rows)
        if is_gemma:
            for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                yield from norm(f"{prefix}{name}")
            for name in ("attn_q_norm", "attn_k_norm"):
                yield vectors(f"{prefix}{name}.weight", shape.head_dim)
        else:
            for name in ("attn_output_norm", "layer_output_norm"):
                yield from norm(f"{prefix}{name}")


def add_encoder_metadata(writer: GGUFWriter, shape: Shape, encoder: Encoder) -> None:
    """What files of such models say besides."""
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.MEAN)
    if encoder.window:
        writer.add_sliding_window(encoder.window)
        writer.add_sliding_window_pattern(encoder.window_period)
    else:
        writer.add_token_type_count(N_TOKEN_TYPES)
        writer.add_layer_norm_eps(shape.norm_epsilon)

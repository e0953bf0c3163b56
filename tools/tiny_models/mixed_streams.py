"""Residual streams that are mixed before every branch, indexers of blocks, and n-grams."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from tools.tiny_models.model import TinyModel

TABLE = "per_layer_token_embd.weight"
# Rows of the table that no hash names.
SPARE_ROWS = 5
END_TOKEN = 2
# Float tensors of two dimensions.
VECTOR_SUFFIXES = (".ple_conv1d.weight",)
# Matrices whose rows are shorter than blocks of 256.
SHORT_ROWS = ("_up.weight",)


def table_sizes(model: TinyModel) -> list[int]:
    """Rows that each hash may name: odd numbers, all of them different."""
    n_heads = (model.ngram_tokens - 1) * model.ngram_heads
    return [61 + 10 * head for head in range(n_heads)]


def row_dim(model: TinyModel) -> int:
    return model.model_dim // len(table_sizes(model))


def add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    name = model.architecture
    writer.add_uint32(f"{name}.hyper_connection.count", model.n_streams)
    writer.add_uint32(f"{name}.hyper_connection.low_rank", model.stream_rank)
    writer.add_indexer_head_count(model.index_heads)
    writer.add_indexer_key_length(model.index_key_dim)
    writer.add_indexer_top_k(model.index_top_k)
    ratios = [
        model.index_block_tokens * (model.mixer(layer) == "attention")
        for layer in range(model.n_layers)
    ]
    writer.add_array(f"{name}.attention.compress_ratios", ratios)
    if not model.ngram_tokens:
        return
    sizes = table_sizes(model)
    # As large as those of the published model.
    factors = [2**44 + 12_345_678_901 * (i + 1) for i in range(model.ngram_tokens)]
    writer.add_array(f"{name}.ple.layers", [model.ngram_layer])
    for key, value in (
        ("ple.ngram_size", model.ngram_tokens),
        ("ple.heads_per_ngram", model.ngram_heads),
        ("ple.conv_kernel", model.ngram_taps),
        ("ple.eos_token_id", END_TOKEN),
        ("embedding_length_per_layer_input", row_dim(model)),
    ):
        writer.add_uint32(f"{name}.{key}", value)
    for key, numbers in (
        ("layer_multipliers", factors),
        ("head_offsets", [sum(sizes[:i]) for i in range(len(sizes))]),
        ("head_vocab_sizes", sizes),
    ):
        writer.add_key_value(
            f"{name}.ple.{key}", numbers, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64
        )


def add_table(normal: Callable[..., None], model: TinyModel) -> None:
    if model.ngram_tokens:
        normal(TABLE, sum(table_sizes(model)) + SPARE_ROWS, row_dim(model), std=1.0)


def add_mixer(normal: Callable[..., None], model: TinyModel, name: str, *, shares: bool) -> None:
    """What a branch, or the output, reads of the streams."""
    width, rank = model.n_streams * model.model_dim, model.stream_rank
    normal(f"{name}_norm.weight", width, std=0.1, mean=1.0)
    normal(f"{name}_down.weight", rank, width, std=3.0 * model.n_streams * width**-0.5)
    normal(f"{name}_up.weight", width, rank, std=2.0 * rank**-0.5)
    if shares:
        normal(f"{name}_inject.weight", model.n_streams, width, std=model.n_streams * width**-0.5)


def add_indexer(normal: Callable[..., None], model: TinyModel, layer: int, n_heads: int) -> None:
    """One that chooses blocks of tokens."""
    prefix, width, key_dim = f"blk.{layer}.indexer.", model.model_dim, model.index_key_dim
    for name, rows in (("q", n_heads * key_dim), ("k", key_dim)):
        normal(f"{prefix}{name}_proj.weight", rows, width, std=width**-0.5)
        normal(f"{prefix}{name}_norm.weight", key_dim, std=0.1, mean=1.0)


def add_layer(
    tensors: dict[str, NDArray[np.float32]],
    normal: Callable[..., None],
    model: TinyModel,
    layer: int,
) -> None:
    prefix, width = f"blk.{layer}.", model.model_dim
    add_mixer(normal, model, f"{prefix}hc_attn", shares=True)
    add_mixer(normal, model, f"{prefix}hc_ffn", shares=True)
    if model.mixer(layer) == "attention":
        add_indexer(normal, model, layer, model.index_heads)
    if not model.ngram_tokens or layer != model.ngram_layer:
        return
    streams_dim = model.n_streams * width
    normal(f"{prefix}ple_key.weight", streams_dim, width, std=width**-0.5)
    normal(f"{prefix}ple_value.weight", width, width, std=width**-0.5)
    for name in ("key", "query", "conv"):
        normal(f"{prefix}ple_norm_{name}.weight", streams_dim, std=0.1, mean=1.0)
    normal(f"{prefix}ple_conv1d.weight", streams_dim, model.ngram_taps, std=0.5)
    # A row per stream, as llama.cpp writes a file anew.
    name = f"{prefix}ple_norm_query.weight"
    tensors[name] = tensors[name].reshape(model.n_streams, width)

"""Residual streams that are mixed before every branch, and n-grams that a layer adds to them.

What files of Qwen3.8-Flash-Next say of hyper-connections and of per-layer embeddings (PLE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import FormatError
from ..formats.gguf_header import TensorInfo
from ..formats.metadata import quote
from ..layer_config import MAX_CONV_TAPS, LayerConfig
from ..model_config import NgramConfig
from .keys import ArchitectureKeys

COUNT_KEY = "hyper_connection.count"
RANK_KEY = "hyper_connection.low_rank"
LAYERS_KEY = "ple.layers"
ROW_DIM_KEY = "embedding_length_per_layer_input"
TABLE_TENSOR = "per_layer_token_embd.weight"
# As the core has them.
MAX_STREAMS, MAX_STREAM_RANK = 16, 2**16
MAX_NGRAM_TOKENS, MAX_NGRAM_HEADS = 16, 256
MAX_ROW_DIM = 2**16
MAX_TABLE_ROWS = 2**40


def read_streams(keys: ArchitectureKeys) -> tuple[int, int]:
    """The number of streams, and of numbers that gates are made of."""
    n_streams = keys.integer(COUNT_KEY, minimum=2, maximum=MAX_STREAMS)
    return n_streams, keys.integer(RANK_KEY, maximum=MAX_STREAM_RANK)


def read_ngrams(
    keys: ArchitectureKeys, layers: tuple[LayerConfig, ...], model_dim: int, vocab_size: int
) -> NgramConfig | None:
    """What a file says of its n-grams, if it has some; as many rows as their hashes may name.

    Raises ``FormatError`` that names the key.
    """
    if not keys.has(LAYERS_KEY):
        return None
    numbers = keys.metadata.get_array(keys.full(LAYERS_KEY), kinds="iu").tolist()
    if not numbers:
        return None
    if len(numbers) > 1:
        raise FormatError(
            f"{keys.quoted(LAYERS_KEY)} names {len(numbers)} layers, but only one with n-grams is "
            "supported, as the published model has"
        )
    layer = numbers[0]
    if not 0 <= layer < len(layers) or layers[layer].mixer != "delta_net":
        raise FormatError(
            f"{keys.quoted(LAYERS_KEY)} names layer {layer}, which is none of the {len(layers)} "
            "that do not attend; the file is damaged"
        )
    n_tokens = keys.integer("ple.ngram_size", minimum=2, maximum=MAX_NGRAM_TOKENS)
    most = MAX_NGRAM_HEADS // (n_tokens - 1)
    per_size = keys.integer("ple.heads_per_ngram", maximum=most)
    n_heads = (n_tokens - 1) * per_size
    row_dim = keys.integer(ROW_DIM_KEY, maximum=MAX_ROW_DIM)
    if row_dim * n_heads != model_dim:
        raise FormatError(
            f"{keys.quoted(ROW_DIM_KEY)} is {row_dim}, but {n_heads} such rows must be as wide as "
            f"{keys.quoted('embedding_length')} {model_dim}"
        )
    factors, offsets, sizes = (
        _read_numbers(keys, f"ple.{name}", length)
        for name, length in (
            ("layer_multipliers", n_tokens),
            ("head_offsets", n_heads),
            ("head_vocab_sizes", n_heads),
        )
    )
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    if min(sizes) < 1 or max(ends) > MAX_TABLE_ROWS:
        raise FormatError(
            f"{keys.quoted('ple.head_offsets')} and {keys.quoted('ple.head_vocab_sizes')} name "
            f"ranges of no rows, or beyond {MAX_TABLE_ROWS}; the file is damaged"
        )
    return NgramConfig(
        layer=layer,
        n_tokens=n_tokens,
        n_heads_per_size=per_size,
        row_dim=row_dim,
        n_rows=max(ends),
        n_taps=keys.integer("ple.conv_kernel", minimum=2, maximum=MAX_CONV_TAPS),
        end_token=keys.integer("ple.eos_token_id", minimum=0, maximum=vocab_size - 1),
        factors=factors,
        offsets=offsets,
        sizes=sizes,
    )


def _read_numbers(keys: ArchitectureKeys, key: str, length: int) -> tuple[int, ...]:
    numbers = keys.metadata.get_array(keys.full(key), kinds="iu", length=length).tolist()
    if min(numbers) < 0:
        raise FormatError(f"{keys.quoted(key)} holds {min(numbers)}; the file is damaged")
    return tuple(numbers)


def with_ngrams(
    layers: tuple[LayerConfig, ...], ngrams: NgramConfig | None, streams_dim: int
) -> tuple[LayerConfig, ...]:
    """The layers, of which one keeps what the convolution of n-grams looks back on."""
    if ngrams is None:
        return layers
    rows = (ngrams.n_taps - 1) * ngrams.n_tokens
    own = replace(layers[ngrams.layer], history_rows=rows, history_dim=streams_dim)
    return (*layers[: ngrams.layer], own, *layers[ngrams.layer + 1 :])


def ngram_sizes(ngrams: NgramConfig | None) -> Mapping[str, int]:
    """Named sizes of the tensors of n-grams: see ``Hyperparameters.sizes``."""
    return {"n_ngram_taps": ngrams.n_taps if ngrams else 0}


def find_table(
    tensors: Mapping[str, TensorInfo], ngrams: NgramConfig, types: Sequence[str]
) -> TensorInfo:
    """The table of the n-grams, which may have more rows than are named.

    Raises ``FormatError`` where it is missing or of another shape or type.
    """
    info = tensors.get(TABLE_TENSOR)
    if info is None:
        raise FormatError(
            f"1 tensor of n-grams missing: {quote(TABLE_TENSOR)}; the file is incomplete"
        )
    if len(info.shape) != 2 or info.cols != ngrams.row_dim or info.rows < ngrams.n_rows:
        raise FormatError(
            f"tensor {quote(TABLE_TENSOR)} has shape {list(info.shape)}, but the hyperparameters "
            f"make it [{ngrams.row_dim}, {ngrams.n_rows} or more]; the file is damaged or was "
            "converted wrongly"
        )
    if info.type_name not in types:
        raise FormatError(
            f"tensor {quote(TABLE_TENSOR)} is of type {info.type_name}, which is not supported "
            f"for it; supported: {', '.join(types)}"
        )
    return info

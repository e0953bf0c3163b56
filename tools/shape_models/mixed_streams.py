"""What Qwen3.8-Flash-Next has besides: mixed streams, indexers of blocks, and n-grams."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gguf import GGUFValueType, GGUFWriter

from tools.shape_models.shape import MixedStreams, Shape
from tools.shape_models.tensor import Tensor

END_TOKEN = 2
NGRAM_LAYER = 0


def mixer_tensors(
    name: str,
    shape: Shape,
    streams: MixedStreams,
    matrix: Callable[..., Tensor],
    vectors: Callable[..., Tensor],
) -> Iterator[Tensor]:
    """What a branch, or the output, reads of the streams."""
    streams_dim = streams.n_streams * shape.model_dim
    yield vectors(f"{name}_norm.weight", streams_dim)
    yield matrix(f"{name}_down", streams.rank, streams_dim)
    yield matrix(f"{name}_up", streams_dim, streams.rank)


def layer_tensors(
    prefix: str,
    shape: Shape,
    streams: MixedStreams,
    layer: int,
    matrix: Callable[..., Tensor],
    vectors: Callable[..., Tensor],
) -> Iterator[Tensor]:
    """In the place of a layer's norms."""
    width, streams_dim = shape.model_dim, streams.n_streams * shape.model_dim
    for branch in ("attn", "ffn"):
        yield from mixer_tensors(f"{prefix}hc_{branch}", shape, streams, matrix, vectors)
        yield matrix(f"{prefix}hc_{branch}_inject", streams.n_streams, streams_dim)
    if shape.attends(layer):
        yield vectors(
            f"{prefix}indexer.q_proj.weight", streams.index_heads * streams.index_dim, width
        )
        yield vectors(f"{prefix}indexer.k_proj.weight", streams.index_dim, width)
        for name in ("q", "k"):
            yield vectors(f"{prefix}indexer.{name}_norm.weight", streams.index_dim)
    if layer != NGRAM_LAYER:
        return
    yield matrix(f"{prefix}ple_key", streams_dim, width)
    yield matrix(f"{prefix}ple_value", width, width)
    for name in ("key", "query", "conv"):
        yield vectors(f"{prefix}ple_norm_{name}.weight", streams_dim)
    yield vectors(f"{prefix}ple_conv1d.weight", streams_dim, streams.ngram_taps)


def add_stream_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """Keys of all this, if there is any."""
    if (streams := shape.mixed_streams) is None:
        return
    name, n_heads = shape.architecture, streams.n_ngram_heads
    writer.add_uint32(f"{name}.hyper_connection.count", streams.n_streams)
    writer.add_uint32(f"{name}.hyper_connection.low_rank", streams.rank)
    writer.add_indexer_head_count(streams.index_heads)
    writer.add_indexer_key_length(streams.index_dim)
    writer.add_indexer_top_k(streams.index_top_k)
    ratios = [streams.block_tokens * shape.attends(layer) for layer in range(shape.n_layers)]
    writer.add_array(f"{name}.attention.compress_ratios", ratios)
    writer.add_array(f"{name}.ple.layers", [NGRAM_LAYER])
    for key, value in (
        ("ple.ngram_size", streams.ngram_tokens),
        ("ple.heads_per_ngram", n_heads // (streams.ngram_tokens - 1)),
        ("ple.conv_kernel", streams.ngram_taps),
        ("ple.eos_token_id", END_TOKEN),
        ("embedding_length_per_layer_input", shape.model_dim // n_heads),
    ):
        writer.add_uint32(f"{name}.{key}", value)
    for key, numbers in (
        ("layer_multipliers", [2**44 + 9_876_543_211 * i for i in range(streams.ngram_tokens)]),
        ("head_offsets", [i * streams.ngram_rows for i in range(n_heads)]),
        ("head_vocab_sizes", [streams.ngram_rows] * n_heads),
    ):
        writer.add_key_value(
            f"{name}.ple.{key}", numbers, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64
        )

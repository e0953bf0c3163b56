"""Tensors of residual streams that are mixed before every branch, and of n-grams."""

from __future__ import annotations

from .tensors import tensor, tensors_of


def _mixer(name: str) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
    return (
        (f"{name}_norm.weight", ("streams_dim",), True),
        (f"{name}_down.weight", ("streams_dim", "stream_rank"), False),
        (f"{name}_up.weight", ("stream_rank", "streams_dim"), False),
    )


# Norms of all streams are one vector, or have a row each.
STREAM_MIXERS = tuple(
    tensor(name, *shape, flattens=flattens)
    for name, shape, flattens in (
        *_mixer("output_hc"),
        *_mixer("blk.{layer}.hc_attn"),
        ("blk.{layer}.hc_attn_inject.weight", ("streams_dim", "n_mixed_streams"), False),
        *_mixer("blk.{layer}.hc_ffn"),
        ("blk.{layer}.hc_ffn_inject.weight", ("streams_dim", "n_mixed_streams"), False),
    )
)
# Beside the table itself, which stays in the file.
NGRAMS = tensors_of(
    "ngrams",
    (
        tensor("blk.{layer}.ple_key.weight", "model_dim", "streams_dim"),
        tensor("blk.{layer}.ple_value.weight", "model_dim", "model_dim"),
        *(
            tensor(f"blk.{{layer}}.ple_norm_{name}.weight", "streams_dim", flattens=True)
            for name in ("key", "query", "conv")
        ),
        tensor("blk.{layer}.ple_conv1d.weight", "n_ngram_taps", "streams_dim", is_vectors=True),
    ),
)

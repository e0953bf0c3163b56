"""Self-checks of the pair counts."""

from __future__ import annotations

import pytest

from tests.reference.h2o import H2OLayer
from tests.reference.pairs import chunk_bounds, pairs_chunked, pairs_dense
from tests.reference.qkv import random_qkv


@pytest.mark.parametrize(
    ("n_tokens", "dense", "chunked"),
    [
        (2048, 2_098_176, 1_573_888),
        (4096, 8_390_656, 3_672_064),
        (8192, 33_558_528, 7_868_416),
        (16384, 134_225_920, 16_261_120),
        (32768, 536_887_296, 33_046_528),
    ],
)
def test_recommended_sizes(n_tokens: int, dense: int, chunked: int) -> None:
    assert pairs_dense(n_tokens) == dense
    sizes = {"chunk_size": 1024, "memory_size": 512}
    assert pairs_chunked(n_tokens, **sizes) == chunked
    assert pairs_chunked(n_tokens, batch_size=4096, **sizes) == chunked


@pytest.mark.parametrize(
    ("chunk_size", "memory_size", "gain"), [(512, 256, 4.26), (512, 384, 3.46), (2048, 512, 1.60)]
)
def test_gains_at_4096(chunk_size: int, memory_size: int, gain: float) -> None:
    chunked = pairs_chunked(4096, chunk_size=chunk_size, memory_size=memory_size)
    assert pairs_dense(4096) / chunked == pytest.approx(gain, abs=0.005)


@pytest.mark.parametrize("n_tokens", [1, 15, 16, 17, 31, 32, 45])
@pytest.mark.parametrize("batch_size", [16, 20, 45])
@pytest.mark.parametrize("memory_size", [5, 8, 100])
def test_counts_equal_what_the_oracle_reads(
    n_tokens: int, batch_size: int, memory_size: int
) -> None:
    q, k, v = random_qkv(0, n_heads=2, n_kv_heads=1, n_tokens=n_tokens, head_dim=4)
    layer = H2OLayer(chunk_size=16, local=3, heavy=memory_size - 3)
    for start in range(0, n_tokens, batch_size):
        layer.prefill(*(array[:, start : start + batch_size] for array in (q, k, v)))
    pairs = sum(
        pairs_dense(chunk.stop - chunk.start) + (chunk.stop - chunk.start) * len(chunk.memory[0])
        for chunk in layer.chunks
    )
    sizes = {"chunk_size": 16, "batch_size": batch_size}
    assert pairs == pairs_chunked(n_tokens, memory_size=memory_size, **sizes)
    assert [(c.start, c.stop) for c in layer.chunks] == chunk_bounds(n_tokens, **sizes)


def test_memory_for_everything_counts_as_dense() -> None:
    assert pairs_chunked(1000, chunk_size=64, memory_size=1000) == pairs_dense(1000)

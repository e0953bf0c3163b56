"""What generated tokens are recorded to have read."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import (
    LLM,
    DenseConfig,
    PrefillConfig,
    QuestConfig,
    RuvllmConfig,
    SparseAttentionConfig,
)
from edgeh2o.evaluation.decode_reads import DECODED_TOKENS, record_reads
from tests.model.model_pair import random_tokens
from tests.reference.ruvllm import read_tokens
from tests.tiny_models import TinyModelFactory

N = 400


@pytest.mark.parametrize(
    "attention",
    [
        DenseConfig(),
        RuvllmConfig(window=20, block_size=16, globals=2),
        QuestConfig(tokens=32, page_size=2, dense_layers=1),
    ],
    ids=lambda attention: attention.algorithm,
)
def test_shares_of_tokens(tiny_model: TinyModelFactory, attention: SparseAttentionConfig) -> None:
    prefill = PrefillConfig(batch_size=512, chunk_size=attention.preferred_chunk_size // 2 or 1)
    steps: list[int] = []
    with LLM(tiny_model(), attention=attention, prefill=prefill, threads=1) as llm:
        shares = record_reads(llm, random_tokens(N), on_tokens=steps.append)
        n_slots = llm.config.n_layers * llm.config.n_kv_heads
    assert shares is not None
    assert shares.shape == (n_slots, N)
    assert (sum(steps), len(steps)) == (N, 1 + DECODED_TOKENS)
    if isinstance(attention, DenseConfig):
        assert np.all(shares == 1)
    elif isinstance(attention, RuvllmConfig):
        expected = np.zeros(N)
        for i in range(N - DECODED_TOKENS, N):
            expected[read_tokens(i, window=20, globals=2)] += 1
        expected /= np.minimum(DECODED_TOKENS, np.arange(N, 0, -1))
        np.testing.assert_allclose(shares, np.tile(expected, (n_slots, 1)))
    else:
        n_dense = n_slots // llm.config.n_layers
        assert np.all(shares[:n_dense] == 1)
        in_pages = shares[n_dense:, : (N - DECODED_TOKENS) // 64 * 64].sum(axis=1)
        np.testing.assert_allclose(in_pages, 32)

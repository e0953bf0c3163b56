"""Errors of KV heads of which generated tokens read few keys, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import HeadwiseConfig, _core
from edgeh2o.engine.decode_probe import DecodeProbe
from edgeh2o.runners.native import NativeModelFile
from tests.tiny_models import TinyModelFactory

N_TOKENS, N_PROMPT, KEYS = 320, 300, 24
N_HEADS, N_KV_HEADS, HEAD_DIM = 8, 2, 32
RULE = HeadwiseConfig(local=8, landmark_size=32)


def _decode(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, budgets: list[int]
) -> np.ndarray:
    """Outputs [n, n_heads, head_dim] behind the prompt, which is read densely here."""
    policy = _core.headwise_policy(
        [None] * N_KV_HEADS,
        local=RULE.local,
        page_size=RULE.landmark_size,
        spread=RULE.landmark_spread,
        decode_from=N_PROMPT,
        decode_budgets=budgets,
    )
    attention = _core.ChunkedAttention(
        policy,
        N_HEADS,
        N_KV_HEADS,
        HEAD_DIM,
        chunk_size=64,
        batch_size=320,
        max_context=N_TOKENS,
        scale=scale,
    )
    attention.run(0, q[:N_PROMPT], k[:N_PROMPT], v[:N_PROMPT], is_last=True)
    rest = range(N_PROMPT, N_TOKENS)
    return np.concatenate(
        [attention.decode(0, q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in rest]
    )


def test_errors_are_those_of_the_output(tiny_model: TinyModelFactory) -> None:
    """However the prompt was read, and of the layer and the head where they arise."""
    rng = np.random.default_rng(0)
    with NativeModelFile(tiny_model(tensor_type="F32", n_layers=2)) as file:
        model = file.load()
    residual = rng.standard_normal((N_TOKENS, model.config.model_dim)).astype(np.float32)
    q = rng.standard_normal((N_TOKENS, N_HEADS, HEAD_DIM)).astype(np.float32)
    k, v = (
        rng.standard_normal((N_TOKENS, N_KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in range(2)
    )
    scale = model.config.attention_scale
    probe = DecodeProbe(model, N_TOKENS, N_PROMPT, KEYS, threads=1, rule=RULE)
    flat = [rows.reshape(N_TOKENS, -1) for rows in (q, k, v)]
    probe(1, residual, *flat, None)
    limited = _decode(q, k, v, scale, [KEYS] * N_KV_HEADS)
    group = N_HEADS // N_KV_HEADS
    logits = scale * np.einsum("qhd,khd->hqk", q[N_PROMPT:], np.repeat(k, group, axis=1))
    logits[:, np.arange(N_TOKENS) > np.arange(N_PROMPT, N_TOKENS)[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    dense = np.einsum("hqk,khd->qhd", weights, np.repeat(v, group, axis=1))
    difference = (limited - dense).reshape(N_TOKENS - N_PROMPT, N_KV_HEADS, -1)
    output = np.split(model.output_weights(1).astype(np.float64), N_KV_HEADS, axis=1)
    stream = np.square(residual[N_PROMPT:].astype(np.float64)).sum()
    expected = [
        np.square(difference[:, head] @ output[head].T).sum() / stream for head in range(N_KV_HEADS)
    ]
    assert probe.errors[:N_KV_HEADS].tolist() == [0, 0]
    assert probe.errors[N_KV_HEADS:] == pytest.approx(expected, rel=0.02)
    assert min(expected) > 1e-4


def test_latent_heads_are_measured(tiny_model: TinyModelFactory) -> None:
    """Which share one row per token: all heads of a layer are one."""
    path = tiny_model(architecture="minicpm3", tensor_type="F32", n_layers=2)
    with NativeModelFile(path) as file:
        model = file.load()
    config = model.config
    assert config.latent is not None
    rng = np.random.default_rng(0)
    widths = (config.model_dim, config.n_heads * config.head_dim, config.head_dim)
    residual, q, rows = (
        rng.standard_normal((N_TOKENS, width)).astype(np.float32) for width in widths
    )
    errors = []
    for keys in (KEYS, 4 * KEYS, N_TOKENS):
        probe = DecodeProbe(model, N_TOKENS, N_PROMPT, keys, threads=1, rule=RULE)
        probe(0, residual, q, rows, rows, None)
        errors.append(probe.errors[0])
    few, more, all_keys = errors
    assert few > more > all_keys == 0

"""Self-checks of the reference decoder."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference.decoder import ReferenceDecoder, half_split_row_order, rotate
from tests.reference.dense import DenseLayer
from tests.reference.h2o import H2OLayer
from tests.tiny_models import TinyModelFactory

CHUNK_SIZE = 32
TIGHT = {"rtol": 1e-9, "atol": 1e-9}
VARIANTS = [
    {},
    {"biases": True, "tied": False},
    {"rotary_dim": 16, "rope_scaling": "linear"},
    {"rope_scaling": "llama3", "context_length": 512},
]


def tokens_of(n_tokens: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 320, size=n_tokens)


def make_h2o(**options: float | None) -> H2OLayer:
    return H2OLayer(chunk_size=CHUNK_SIZE, local=4, heavy=8, **options)


@pytest.mark.parametrize("options", VARIANTS)
def test_half_split_rows_give_the_same_logits(
    tiny_model: TinyModelFactory, options: dict[str, object]
) -> None:
    decoder = ReferenceDecoder.from_gguf(tiny_model(**options))
    tokens = tokens_of(40)
    expected = decoder.start(DenseLayer).prefill(tokens)
    logits = decoder.start(DenseLayer, rope_layout="half_split").prefill(tokens)
    np.testing.assert_allclose(logits, expected, **TIGHT)


def test_options_change_the_logits(tiny_model: TinyModelFactory) -> None:
    tokens = tokens_of(40)
    last = [
        ReferenceDecoder.from_gguf(tiny_model(**options)).start(DenseLayer).prefill(tokens)[-1]
        for options in VARIANTS
    ]
    for a in range(len(last)):
        for b in range(a):
            assert np.abs(last[a] - last[b]).max() > 0.1


@pytest.mark.parametrize("n_tokens", [32, 33, 63, 100])
def test_layer_major_equals_chunk_major(tiny_model: TinyModelFactory, n_tokens: int) -> None:
    decoder = ReferenceDecoder.from_gguf(tiny_model())
    tokens = tokens_of(n_tokens)
    whole, by_chunk = decoder.start(make_h2o), decoder.start(make_h2o)
    expected = whole.prefill(tokens)
    logits = by_chunk.prefill_chunk_major(tokens, chunk_size=CHUNK_SIZE)
    np.testing.assert_allclose(logits, expected, **TIGHT)
    for a, b in zip(whole.layers, by_chunk.layers, strict=True):
        np.testing.assert_allclose(a.scores, b.scores, **TIGHT)


def test_sparse_differs_from_dense_only_after_the_memory_overflows(
    tiny_model: TinyModelFactory,
) -> None:
    decoder = ReferenceDecoder.from_gguf(tiny_model())
    tokens = tokens_of(3 * CHUNK_SIZE)
    dense = decoder.start(DenseLayer).prefill(tokens)
    sparse = decoder.start(make_h2o).prefill(tokens)
    np.testing.assert_allclose(sparse[:CHUNK_SIZE], dense[:CHUNK_SIZE], **TIGHT)
    assert np.std(sparse[CHUNK_SIZE:] - dense[CHUNK_SIZE:]) > 0.1


def test_decode_equals_prefill_of_the_longer_prompt(tiny_model: TinyModelFactory) -> None:
    decoder = ReferenceDecoder.from_gguf(tiny_model())
    tokens = tokens_of(50)
    expected = decoder.start(DenseLayer).prefill(tokens)
    run = decoder.start(DenseLayer)
    run.prefill(tokens[:45])
    for position in range(45, 50):
        np.testing.assert_allclose(run.decode(tokens[position]), expected[position], **TIGHT)
    assert run.position == 50


def test_activations_are_rounded_only_for_quantised_matrices(
    tiny_model: TinyModelFactory,
) -> None:
    tokens = tokens_of(40)
    for tensor_type, is_rounded in (("F16", False), ("Q8_0", True)):
        decoder = ReferenceDecoder.from_gguf(tiny_model(tensor_type=tensor_type))
        exact = decoder.start(DenseLayer).prefill(tokens)
        rounded = decoder.start(DenseLayer, scale_block_of=lambda _: 32).prefill(tokens)
        error = np.std(rounded - exact) / np.std(exact)
        assert (0.003 < error < 0.1) if is_rounded else error == 0.0


def test_rotate_by_hand() -> None:
    x = np.array([[[1.0, 0.0, 0.0, 2.0, 5.0]]])
    angles = np.full((1, 2), np.pi / 2)
    np.testing.assert_allclose(
        rotate(x, angles, "interleaved"), [[[0.0, 1.0, -2.0, 0.0, 5.0]]], atol=1e-15
    )
    np.testing.assert_allclose(
        rotate(x, angles, "half_split"), [[[0.0, -2.0, 1.0, 0.0, 5.0]]], atol=1e-15
    )


def test_half_split_row_order_by_hand() -> None:
    assert half_split_row_order(2, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]

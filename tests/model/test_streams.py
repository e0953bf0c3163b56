"""Several residual streams per token: what they do not depend on, and tokens without any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from tests.model.model_pair import CHUNK_SIZE, load_pair, prefill, random_tokens, split
from tests.tiny_models import TinyModelFactory
from tools.make_tiny_model import write_tiny_model
from tools.tiny_models.tensors import Tensors

MODEL: dict[str, object] = {
    "architecture": "gemma3n",
    "n_layers": 6,
    "sliding_window": 24,
    "n_shared_kv": 3,
    "n_cut_layers": 4,
}


@pytest.mark.parametrize("tensor_type", ["F32", "F16", "Q4_0"])
def test_logits_do_not_depend_on_threads_and_batches(
    tiny_model: TinyModelFactory, tensor_type: str
) -> None:
    """More rows than go through the linear layers at a time, in calls that end between chunks."""
    pair = load_pair(tiny_model, **MODEL, tensor_type=tensor_type)
    tokens = random_tokens(4 * CHUNK_SIZE + 9)

    def session(threads: int, *, all_rows: bool = True) -> _core.Sequence:
        sizes = {"max_context": 512, "batch_size": 512, "chunk_size": CHUNK_SIZE}
        return _core.Sequence(
            pair.core, _core.dense_policy(), threads=threads, all_rows=all_rows, **sizes
        )

    expected = prefill(session(1), tokens)
    for threads, lengths in ((2, [len(tokens)]), (1, [128, 137]), (2, [64, 192, 9])):
        actual = prefill(session(threads), *split(tokens, lengths))
        np.testing.assert_array_equal(actual, expected)
    short, other = session(2, all_rows=False), session(1, all_rows=False)
    logits = short.prefill(tokens, is_last=True)
    other.prefill(tokens[:128], is_last=False)
    np.testing.assert_array_equal(other.prefill(tokens[128:], is_last=True), logits)
    for token in (5, 6):
        np.testing.assert_array_equal(other.decode(token), short.decode(token))


def test_a_token_without_an_embedding(tmp_path: Path) -> None:
    """As those of images, whose rows converters fill with zeros: no length divides by 0."""

    def fill_with_zeros(tensors: Tensors) -> None:
        for name in ("token_embd", "per_layer_token_embd"):
            tensors[f"{name}.weight"][7] = 0.0

    def write(**options: object) -> Path:
        return write_tiny_model(tmp_path / "tiny.gguf", edit=fill_with_zeros, **options)

    pair = load_pair(write, **MODEL)
    tokens = np.array([5, 7, 7, 9], np.int32)
    logits = prefill(pair.session(_core.dense_policy()), tokens)
    assert np.all(np.isfinite(logits))

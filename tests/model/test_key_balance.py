"""Keys that biases make large in a few dimensions are evened out, and logits stay as they are."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edgeh2o import _core, isa
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import (
    CHUNK_SIZE,
    MAX_CONTEXT,
    Logits,
    random_tokens,
    relative_error,
)
from tests.tiny_models import TinyModelFactory, with_vectors

TOKENS, N_DECODED = random_tokens(4 * CHUNK_SIZE + 10), 3
# Of a rotary pair that turns fast, as Qwen 2 has them.
LARGE_DIM, LARGE = 1, 80.0


@pytest.fixture(scope="module")
def biased(tiny_model: TinyModelFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen 2 of two layers, the first of which has large biases of keys."""
    source = tiny_model(architecture="qwen2", n_layers=2)
    name = "blk.0.attn_k.bias"
    (bias,) = (each.data.copy() for each in gguf.GGUFReader(source).tensors if each.name == name)
    bias.reshape(-1, 32)[:, LARGE_DIM] += LARGE
    return with_vectors(source, tmp_path_factory.mktemp("biased") / "model.gguf", {name: bias})


def load(path: Path) -> _core.Model:
    with NativeModelFile(path) as file:
        return file.load()._core_model


def unbalanced(path: Path, monkeypatch: pytest.MonkeyPatch) -> _core.Model:
    with monkeypatch.context() as patch:
        patch.setattr(_core.Model, "finish", lambda self: None)
        return load(path)


def logits(model: _core.Model, cache_type: str = "f16", precision: str = "f32") -> Logits:
    """Of a prompt and of some tokens after it."""
    session = _core.Sequence(
        model,
        _core.dense_policy(),
        max_context=MAX_CONTEXT,
        batch_size=MAX_CONTEXT,
        chunk_size=CHUNK_SIZE,
        cache_type=cache_type,
        precision=precision,
        all_rows=True,
    )
    session.prefill(TOKENS, is_last=True)
    rows = session.row_logits(0, len(TOKENS))
    decoded = [session.decode(int(token)) for token in TOKENS[:N_DECODED]]
    return np.concatenate([rows, np.stack(decoded)])


@pytest.mark.parametrize("name", _core.available_isas())
def test_logits_stay_bit_for_bit(name: str, biased: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = isa.active()
    isa.use(name)
    try:
        plain, model = unbalanced(biased, monkeypatch), load(biased)
        assert model.balances_keys and not plain.balances_keys
        for cache_type in ("f16", "f32"):
            assert np.array_equal(logits(model, cache_type), logits(plain, cache_type))
    finally:
        isa.use(before)


def test_keys_in_8_bits_lose_less(biased: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = unbalanced(biased, monkeypatch), load(biased)
    exact = logits(plain, "f32")
    before, after = (relative_error(logits(m, "q8_0"), exact) for m in (plain, model))
    assert after < before / 3 and after < 0.05


def test_products_in_8_bits_lose_less(biased: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    plain, model = unbalanced(biased, monkeypatch), load(biased)
    exact = logits(plain, "f32")
    before, after = (relative_error(logits(m, "f32", "int8"), exact) for m in (plain, model))
    assert after < 0.7 * before and after < 0.05


def test_models_of_which_nothing_is_evened_out(tiny_model: TinyModelFactory) -> None:
    assert not load(tiny_model(n_layers=2)).balances_keys  # no biases
    assert not load(tiny_model(architecture="qwen3", n_layers=2)).balances_keys  # normed

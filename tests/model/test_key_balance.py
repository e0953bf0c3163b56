"""Keys that biases or norms make large in a few dimensions are evened out, logits unchanged."""

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
HEAD_DIM = 32  # of tiny models
# Of a rotary pair that turns fast, as Qwen 2 has them.
LARGE_DIM, LARGE = 1, 80.0
# Of heads, of projections, and of heads behind the rotation.
NORMED = ("qwen3", "olmo2", "hunyuan-dense")
LARGE_NORMS, LARGE_NORM, SMALL_NORM = (1, 5, 18, 22), 30.0, 0.03


def biased(tiny_model: TinyModelFactory, folder: Path) -> Path:
    """A tiny Qwen 2 of two layers, the first of which has large biases of keys."""
    source = tiny_model(architecture="qwen2", n_layers=2)
    name = "blk.0.attn_k.bias"
    (bias,) = (each.data.copy() for each in gguf.GGUFReader(source).tensors if each.name == name)
    bias.reshape(-1, HEAD_DIM)[:, LARGE_DIM] += LARGE
    return with_vectors(source, folder / "model.gguf", {name: bias})


def normed(
    tiny_model: TinyModelFactory, folder: Path, architecture: str, **options: object
) -> Path:
    """Norms of keys are large where those of queries are small, as Gemma 3 has them, or 0."""
    source = tiny_model(architecture=architecture, n_layers=2, **options)
    vectors = {}
    for tensor in gguf.GGUFReader(source).tensors:
        weights = tensor.data.copy()
        heads = weights.reshape(-1, HEAD_DIM) if "_norm.weight" in tensor.name else weights
        if tensor.name.endswith("attn_k_norm.weight"):
            heads[:, LARGE_NORMS] *= LARGE_NORM
        elif tensor.name.endswith("attn_q_norm.weight"):
            heads[:, LARGE_NORMS] *= SMALL_NORM
            heads[:, [3, 3 + HEAD_DIM // 2]] = 0.0
        else:
            continue
        vectors[tensor.name] = weights
    return with_vectors(source, folder / "model.gguf", vectors)


@pytest.fixture(scope="module", params=["qwen2", *NORMED])
def uneven(
    request: pytest.FixtureRequest,
    tiny_model: TinyModelFactory,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A model whose keys are large in a few dimensions."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen2":
        return biased(tiny_model, folder)
    return normed(tiny_model, folder, request.param)


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
def test_logits_stay_bit_for_bit(name: str, uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = isa.active()
    isa.use(name)
    try:
        plain, model = unbalanced(uneven, monkeypatch), load(uneven)
        assert model.balances_keys and not plain.balances_keys
        assert np.array_equal(logits(model, "f32"), logits(plain, "f32"))
        # Keys below the normal numbers of f16 are rounded finer.
        assert relative_error(logits(model, "f16"), logits(plain, "f16")) < 1e-6
    finally:
        isa.use(before)


def test_keys_in_8_bits_lose_less(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = unbalanced(uneven, monkeypatch), load(uneven)
    exact = logits(plain, "f32")
    before, after = (relative_error(logits(m, "q8_0"), exact) for m in (plain, model))
    assert after < before / 2 and after < 0.08


def test_products_in_8_bits_lose_less(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    plain, model = unbalanced(uneven, monkeypatch), load(uneven)
    exact = logits(plain, "f32")
    before, after = (relative_error(logits(m, "f32", "int8"), exact) for m in (plain, model))
    assert after < 0.7 * before and after < 0.08


def test_models_of_which_nothing_is_evened_out(tiny_model: TinyModelFactory) -> None:
    assert not load(tiny_model(n_layers=2)).balances_keys  # no biases


def test_layers_that_share_keys_stay_as_they_are(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    """The queries of others read them too."""
    assert not load(normed(tiny_model, tmp_path, "gemma4", n_shared_kv=1)).balances_keys
    assert load(normed(tiny_model, tmp_path, "gemma4")).balances_keys

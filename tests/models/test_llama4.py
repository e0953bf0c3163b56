"""Llama 4: windows that begin at fixed positions, experts by steps, norms of rotated heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o import _core
from edgeh2o.errors import FormatError
from tests.model.model_pair import load_pair, random_tokens, relative_error
from tests.models.tiny_file import read, read_tiny, write_tiny
from tests.reference.dense import DenseLayer
from tests.tiny_models import TinyModelFactory


def test_layers_as_no_key_says(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "llama4")
    assert [layer.window for layer in config.layers] == [8192, 8192, 8192, 0, 8192, 8192]
    assert [layer.is_chunked for layer in config.layers] == [
        layer.window > 0 for layer in config.layers
    ]
    assert [layer.has_rope for layer in config.layers] == [
        layer.window > 0 for layer in config.layers
    ]
    assert config.norms_rotated and config.qk_norm == "none"
    assert (config.temperature_scale, config.temperature_period) == (0.1, 8192)
    assert config.temperature_offset == 1 and config.grows_unrotated
    assert config.expert_gate == "sigmoid" and not config.normalises_experts
    assert config.scales_expert_inputs and config.shared_ffn_dim == 16


def test_a_file_without_windows(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "llama4", sliding_window=0)
    assert not any(layer.window or layer.is_chunked for layer in config.layers)
    assert all(layer.has_rope for layer in config.layers)


def test_heads_of_maverick_are_not_normed(tiny_model: TinyModelFactory) -> None:
    assert not read_tiny(tiny_model, "llama4", n_experts=128).norms_rotated


def test_experts_by_steps(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(layer.is_dense for layer in read_tiny(tiny_model, "llama4").layers)
    layers = read_tiny(tiny_model, "llama4", experts_step=2).layers
    assert [layer.is_dense for layer in layers] == [True, False] * 3
    monkeypatch.setattr(GGUFWriter, "add_interleave_moe_layer_step", lambda *_: None)
    with pytest.raises(FormatError, match=r"'llama4\.interleave_moe_layer_step' .*is missing"):
        read(write_tiny(tmp_path, "llama4"))


def test_rows_cannot_be_evicted(tiny_model: TinyModelFactory) -> None:
    """Chunks begin at fixed positions."""
    pair = load_pair(tiny_model, architecture="llama4", n_layers=4, sliding_window=20)
    session = pair.session(_core.dense_policy())
    session.prefill(random_tokens(50), is_last=True)
    with pytest.raises(ValueError, match=r"fixed positions.*--context-full shift"):
        session.allow_eviction(True)


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
def test_tokens_of_two_chunks_in_one_call(tiny_model: TinyModelFactory, cache_type: str) -> None:
    """Each sees its own chunk, of a cache of any type, as if it came alone."""
    options = {"n_layers": 4, "sliding_window": 20, "n_experts_used": 1}
    pair = load_pair(tiny_model, architecture="llama4", **options)
    tokens = random_tokens(42)
    run = pair.reference.start(DenseLayer, rope_layout="half_split", cache_type=cache_type)
    expected = run.prefill(tokens)[-4:]
    session = pair.session(_core.dense_policy(), cache_type=cache_type)
    session.prefill(tokens[:38], is_last=True)
    together = np.array(session.decode_batch(tokens[38:]))
    assert relative_error(together, expected) < (0.02 if cache_type == "q8_0" else 2e-3)
    session.reset()
    session.prefill(tokens[:38], is_last=True)
    alone = np.stack([session.decode(int(token)) for token in tokens[38:]])
    np.testing.assert_array_equal(together, alone)

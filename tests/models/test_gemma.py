"""Layers of Gemma 3n and 4: windows, shared keys and values, inputs per token, cut gates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o.errors import FormatError
from tests.models.tiny_file import read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors

GEMMA4: dict[str, object] = {
    **{"architecture": "gemma4", "sliding_window": 5, "sliding_window_pattern": 3},
    **{"head_dim_sliding": 4, "n_shared_kv": 3, "token_input_dim": 4},
}

GEMMA3N: dict[str, object] = {
    **{"architecture": "gemma3n", "sliding_window": 5, "sliding_window_pattern": 3},
    **{"n_shared_kv": 3, "token_input_dim": 4, "n_cut_layers": 2},
}


@pytest.mark.parametrize("architecture", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("key", ["sliding_window", "sliding_window_pattern"])
def test_gemma4_says_what_its_windows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, architecture: str
) -> None:
    monkeypatch.setattr(GGUFWriter, f"add_{key}", lambda *arguments: None)
    path = write_tiny(tmp_path, architecture)
    with pytest.raises(FormatError, match=rf"'{architecture}.attention.{key}'.* is missing"):
        read(path)


def test_layers_of_gemma4(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, **GEMMA4)
    assert [layer.window for layer in config.layers] == [5, 5, 0] * 2
    assert [layer.head_dim for layer in config.layers] == [4, 4, 8] * 2
    assert [layer.kv_distance for layer in config.layers] == [0, 0, 0, 2, 3, 3]
    assert (config.attention_scale, config.token_input_dim) == (1.0, 4)
    assert len(config.rope_inv_freq) == 4 and len(config.sliding_rope_inv_freq) == 2
    # A quarter of the pairs of the other layers is rotated.
    np.testing.assert_allclose(config.rope_inv_freq, [1.0, 0.0, 0.0, 0.0], atol=1e-20)
    assert not config.has_like_layers


def test_keys_and_values_that_nobody_reads_are_left(tmp_path: Path) -> None:
    def add_unread(tensors: Tensors) -> None:
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            tensors[f"blk.5.{name}.weight"] = tensors[f"blk.2.{name}.weight"]

    path = write_tiny(tmp_path, edit=add_unread, **GEMMA4)
    names = {binding.name for binding in read(path)[1]}
    assert "blk.2.attn_k.weight" in names and "blk.5.attn_q.weight" in names
    assert not names & {f"blk.5.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm")}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_shared_kv": 6}, "shared_kv_layers' is 6"),
        ({"n_shared_kv": 5}, "finds no layer of its kind"),
        ({"n_kv_heads": (2, 2, 2, 2, 2, 1)}, "layer 5 finds no layer of its kind and KV heads"),
        ({"head_dim_sliding": 3}, "value_length_swa' is 3"),
    ],
)
def test_layers_of_gemma4_that_cannot_be(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    path = write_tiny(tmp_path, **{**GEMMA4, **options})
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_layers_of_gemma3n(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, **GEMMA3N)
    assert [layer.window for layer in config.layers] == [5, 5, 0] * 2
    assert [layer.kv_distance for layer in config.layers] == [0, 0, 0, 2, 3, 3]
    cutoffs = [layer.gate_cutoff for layer in config.layers]
    np.testing.assert_allclose(cutoffs[:2], 1.6448534, rtol=1e-6)
    assert cutoffs[2:] == [None] * 4
    assert (config.attention_scale, config.logit_soft_cap, config.laurel_rank) == (1.0, 30.0, 64)
    assert config.has_streams and config.norms_values and not config.has_like_layers


def test_gates_of_gemma3n_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the published models: of the first ten layers."""
    monkeypatch.setattr(GGUFWriter, "add_activation_sparsity_scale", lambda *arguments: None)
    path = write_tiny(tmp_path, **{**GEMMA3N, "n_layers": 12})
    cutoffs = [layer.gate_cutoff for layer in read(path)[0].layers]
    assert cutoffs == [1.6448533535003662] * 10 + [None] * 2


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("altup_num_inputs", 3, "'gemma3n.altup.num_inputs' is 3, but only 4 is supported"),
        ("altup_active_idx", 1, "'gemma3n.altup.active_idx' is 1, but only 0 is supported"),
        ("activation_sparsity_scale", [0.5] * 5, "activation_sparsity_scale' has 5 items"),
        ("activation_sparsity_scale", [float("nan")] * 6, "must hold standard deviations"),
        ("activation_sparsity_scale", [float("inf")] * 6, "must hold standard deviations"),
        ("activation_sparsity_scale", [1e3] * 6, "must hold standard deviations"),
    ],
)
def test_layers_of_gemma3n_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, problem: str
) -> None:
    original = getattr(GGUFWriter, f"add_{key}")
    monkeypatch.setattr(GGUFWriter, f"add_{key}", lambda writer, _: original(writer, value))
    path = write_tiny(tmp_path, **GEMMA3N)
    with pytest.raises(FormatError, match=problem):
        read(path)

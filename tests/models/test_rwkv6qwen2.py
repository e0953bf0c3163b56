"""QRWKV6: what files say of linear attention whose keys and values are of fewer heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.runners.core_config import core_config
from tests.models.tiny_file import read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors


def test_layers_of_rwkv6qwen2(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "rwkv6qwen2")
    first = config.layers[0]
    assert {layer.mixer for layer in config.layers} == {"rwkv6"}
    assert (first.n_wkv_heads, first.n_wkv_kv_heads, first.wkv_head_dim) == (2, 1, 16)
    assert not first.wkv_norms_heads and not first.has_shifted_network
    assert {layer.output_scale for layer in config.layers} == {1.0}
    assert config.is_gated and not config.centres_norms and not config.has_embedding_norm
    assert config.is_recurrent and config.n_heads == config.n_kv_heads == 0
    for n_heads in (0, 2):  # both of which say that every head has its own
        changed = read_tiny(tiny_model, "rwkv6qwen2", n_wkv_kv_heads=n_heads)
        assert changed.layers[0].n_wkv_kv_heads == 2


def test_biases_may_be_left_out(tmp_path: Path) -> None:
    _, bindings = read(write_tiny(tmp_path, "rwkv6qwen2", has_wkv_biases=False))
    assert not [binding.name for binding in bindings if binding.name.endswith(".bias")]
    _, bindings = read(write_tiny(tmp_path, "rwkv6qwen2"))
    names = {binding.name for binding in bindings}
    assert {f"blk.1.time_mix_{name}.bias" for name in ("key", "value", "receptance")} < names


def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match=r"'rwkv6qwen2.attention.head_count_kv' is 3, .* the 2 "):
        read(write_tiny(tmp_path, "rwkv6qwen2", n_wkv_kv_heads=3))
    key = "rwkv6qwen2.token_shift_count"
    with monkeypatch.context() as patch:
        patch.setattr(GGUFWriter, "add_token_shift_count", lambda w, _: w.add_uint32(key, 2))
        with pytest.raises(FormatError, match=rf"'{key}' is 2, but only 1 .* of the mixer"):
            read(write_tiny(tmp_path, "rwkv6qwen2"))

    def add_first(tensors: Tensors) -> None:
        tensors["blk.1.time_mix_first.weight"] = np.ones((2, 16), np.float32)

    with pytest.raises(FormatError, match=r"does not use: 'blk.1.time_mix_first.weight'"):
        read(write_tiny(tmp_path, "rwkv6qwen2", edit=add_first))

    def widen(tensors: Tensors) -> None:
        name = "blk.1.time_mix_key.weight"
        tensors[name] = np.concatenate([tensors[name]] * 2)

    with pytest.raises(FormatError, match=r"'blk.1.time_mix_key.weight' has shape \[32, 32\]"):
        read(write_tiny(tmp_path, "rwkv6qwen2", edit=widen))


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "rwkv6qwen2")
    core_config(config)
    for changes, problem in (
        ({"n_wkv_kv_heads": 3}, "an RWKV layer has 2 heads, and 3 of keys and values"),
        ({"n_wkv_kv_heads": 0}, "an RWKV layer has 2 heads, and 0 of keys and values"),
        ({"wkv_norms_heads": True}, "an RWKV layer has 2 heads, and 1 of keys and values"),
        ({"has_shifted_network": True}, "RMS norms and a network with a gate"),
        ({"ffn_dim": 0}, "RMS norms and a network with a gate"),
    ):
        layers = (replace(config.layers[0], **changes), *config.layers[1:])
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, layers=layers))
    with pytest.raises(FormatError, match="LayerNorm and a network that looks back"):
        core_config(replace(config, centres_norms=True))


def test_a_quantised_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    sizes = {"model_dim": 256, "ffn_dim": 256, "n_layers": 2, "wkv_head_dim": 64, "tied": False}
    model = tiny_model(architecture="rwkv6qwen2", **sizes)
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "q4_k_m"]) == 0
    _, bindings = read(tmp_path / "out.gguf")
    types = {binding.name: binding.info.type_name for binding in bindings}
    assert types["blk.1.ffn_up.weight"] == types["blk.1.time_mix_key.weight"] == "Q4_K"
    # As llama-quantize leaves them.
    names = ("w1", "w2.4", "decay_w1", "decay_w2", "lerp_fused.0")
    assert {types[f"blk.1.time_mix_{name}.weight"] for name in names} == {"F32"}
    assert main(["run", str(tmp_path / "out.gguf"), "-p", "the thing", "-n", "3"]) == 0

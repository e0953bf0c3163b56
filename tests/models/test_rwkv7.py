"""RWKV-7: what files say of layers whose mixer and network look back by one token each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.model_config import DecoderConfig
from edgeh2o.runners.core_config import core_config
from tests.models.tiny_file import read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors


def test_layers_of_rwkv7(
    tiny_model: TinyModelFactory, read_with_key: Callable[..., DecoderConfig]
) -> None:
    config = read_tiny(tiny_model, "rwkv7")
    first, second = config.layers[:2]
    assert {layer.mixer for layer in config.layers} == {"rwkv7"}
    assert (first.n_wkv_heads, first.wkv_head_dim, first.n_conv_taps) == (2, 16, 2)
    assert (second.wkv_decay_rank, second.wkv_rate_rank, second.wkv_gate_rank) == (32, 64, 96)
    assert (first.wkv_value_rank, second.wkv_value_rank) == (0, 32)
    assert config.has_embedding_norm and config.centres_norms and not config.is_gated
    assert config.is_recurrent and config.n_heads == 0
    read_with_key("rwkv7", lambda w: w.add_token_shift_count(2))


def test_vectors_may_have_fewer_dimensions(tmp_path: Path) -> None:
    def squeeze(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = np.squeeze(tensors[name])

    _, bindings = read(write_tiny(tmp_path, "rwkv7", edit=squeeze))
    names = {binding.name for binding in bindings}
    assert {f"blk.3.time_mix_lerp_fused.{i}.weight" for i in range(6)} < names
    assert {"blk.3.channel_mix_lerp_k.weight", "blk.3.ffn_up.weight"} < names
    assert "blk.0.time_mix_v1.weight" not in names and "blk.1.time_mix_v1.weight" in names


def test_the_first_layer_needs_no_matrices_of_values(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for i in range(3):
            del tensors[f"blk.0.time_mix_v{i}.weight"]

    read(write_tiny(tmp_path, "rwkv7", edit=drop))

    def drop_of_second(tensors: Tensors) -> None:
        del tensors["blk.1.time_mix_v1.weight"]

    with pytest.raises(FormatError, match=r"missing: 'blk.1.time_mix_v1.weight'"):
        read(write_tiny(tmp_path, "rwkv7", edit=drop_of_second))


def test_keys_that_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_with_key: Callable[..., DecoderConfig],
) -> None:
    with pytest.raises(FormatError, match=r"'rwkv7.embedding_length' is 32, .* multiple .* 24"):
        read(write_tiny(tmp_path, "rwkv7", wkv_head_dim=24))
    key = "rwkv7.attention.gate_lora_rank"
    monkeypatch.setattr(GGUFWriter, "add_gate_lora_rank", lambda w, _: w.add_uint32(key, 0))
    with pytest.raises(FormatError, match=r"'rwkv7.attention.gate_lora_rank' is 0"):
        read(write_tiny(tmp_path, "rwkv7"))
    with pytest.raises(FormatError, match=r"'rwkv7.token_shift_count' is 1, but only 2"):
        read_with_key("rwkv7", lambda writer: writer.add_token_shift_count(1))


def test_what_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "rwkv7")
    core_config(config)
    later = config.layers[1]
    for changes, problem in (
        ({"wkv_head_dim": 8, "n_wkv_heads": 4}, "an RWKV layer has 4 heads of 8 numbers"),
        ({"wkv_head_dim": 32}, "RWKV has heads as wide as the model"),
        ({"wkv_rate_rank": 0}, "the vectors of an RWKV-7 layer"),
        ({"wkv_gate_rank": 0}, "LayerNorm and a network that looks back"),
        ({"wkv_norms_heads": False}, "LayerNorm and a network that looks back"),
        ({"wkv_value_rank": 0}, "RWKV has heads as wide as the model"),
        ({"n_wkv_heads": 0}, "RWKV has heads, and may have a network that looks back"),
    ):
        layers = (config.layers[0], replace(later, **changes))
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, layers=layers))


def test_a_quantised_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    sizes = {"model_dim": 256, "ffn_dim": 256, "n_layers": 2, "wkv_head_dim": 64, "tied": False}
    model = tiny_model(architecture="rwkv7", **sizes)
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "q4_k_m"]) == 0
    _, bindings = read(tmp_path / "out.gguf")
    types = {binding.name: binding.info.type_name for binding in bindings}
    assert types["blk.1.ffn_up.weight"] == "Q4_K"
    # As llama-quantize leaves them.
    assert {types[f"blk.1.time_mix_{name}.weight"] for name in ("w1", "w2", "v1", "g2")} == {"F32"}
    assert types["blk.1.time_mix_w0.weight"] == types["blk.1.time_mix_lerp_fused.0.weight"] == "F32"
    assert main(["run", str(tmp_path / "out.gguf"), "-p", "the thing", "-n", "3"]) == 0

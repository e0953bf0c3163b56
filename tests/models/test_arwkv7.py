"""ARWKV: what files say of mixers of RWKV-7 that may lack gates and norms of heads."""

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


def test_layers_of_arwkv7(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "arwkv7")
    first, second = config.layers[:2]
    assert {layer.mixer for layer in config.layers} == {"rwkv7"}
    assert (first.n_wkv_heads, first.n_wkv_kv_heads, first.wkv_head_dim) == (2, 2, 16)
    assert (first.wkv_value_rank, second.wkv_value_rank) == (0, 32)
    assert first.wkv_gate_rank == 96 and first.wkv_norms_heads and not first.has_shifted_network
    assert config.is_gated and not config.centres_norms and not config.has_embedding_norm
    assert config.is_recurrent and config.n_heads == 0
    plain = read_tiny(tiny_model, "arwkv7", wkv_gate_rank=0, has_wkv_norms=False)
    assert {(layer.wkv_gate_rank, layer.wkv_norms_heads) for layer in plain.layers} == {(0, False)}


def test_gates_and_norms_may_be_left_out(tmp_path: Path) -> None:
    _, bindings = read(write_tiny(tmp_path, "arwkv7", wkv_gate_rank=0, has_wkv_norms=False))
    names = {binding.name for binding in bindings}
    shares = {f"blk.1.time_mix_lerp_fused.{i}.weight" for i in range(6)}
    assert shares - names == {"blk.1.time_mix_lerp_fused.5.weight"}
    assert not {f"blk.1.time_mix_{name}" for name in ("g1.weight", "ln.weight", "ln.bias")} & names

    def drop_norms(tensors: Tensors) -> None:
        for kind in ("weight", "bias"):
            del tensors[f"blk.1.time_mix_ln.{kind}"]

    config, _ = read(write_tiny(tmp_path, "arwkv7", edit=drop_norms))
    assert [layer.wkv_norms_heads for layer in config.layers[:3]] == [True, False, True]


def test_parts_that_lack_the_rest(tmp_path: Path) -> None:
    def refuse(name: str, problem: str, **options: object) -> None:
        def drop(tensors: Tensors) -> None:
            del tensors[name]

        with pytest.raises(FormatError, match=problem):
            read(write_tiny(tmp_path, "arwkv7", edit=drop, **options))

    refuse("blk.2.time_mix_ln.bias", "missing: 'blk.2.time_mix_ln.bias'")
    refuse("blk.2.time_mix_ln.weight", "does not use: 'blk.2.time_mix_ln.bias'")
    refuse("blk.2.time_mix_g1.weight", "missing: 'blk.2.time_mix_g1.weight'")
    refuse("blk.2.ffn_gate.weight", "missing: 'blk.2.ffn_gate.weight'")

    def add_share(tensors: Tensors) -> None:
        name = "blk.2.time_mix_lerp_fused.weight"
        tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])

    with pytest.raises(FormatError, match=r"'blk.2.time_mix_lerp_fused.weight' has shape .* 6\]"):
        read(write_tiny(tmp_path, "arwkv7", edit=add_share, wkv_gate_rank=0))


def test_keys_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "arwkv7.token_shift_count"
    monkeypatch.setattr(GGUFWriter, "add_token_shift_count", lambda w, _: w.add_uint32(key, 2))
    with pytest.raises(FormatError, match=rf"'{key}' is 2, but only 1 .* of the mixer"):
        read(write_tiny(tmp_path, "arwkv7"))


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "arwkv7")
    later = config.layers[1]
    for changes, problem in (
        ({"n_wkv_kv_heads": 1}, "an RWKV layer has 2 heads, and 1 of keys and values"),
        ({"wkv_rate_rank": 0}, "the vectors of an RWKV-7 layer have 32, 0 and 96 numbers"),
        ({"wkv_value_rank": 0}, "the values of its first layer in others"),
        ({"has_shifted_network": True}, "RMS norms and a network with a gate"),
    ):
        layers = (config.layers[0], replace(later, **changes))
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, layers=layers))


def test_a_quantised_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    sizes = {"model_dim": 256, "ffn_dim": 256, "n_layers": 2, "wkv_head_dim": 64, "tied": False}
    model = tiny_model(architecture="arwkv7", wkv_gate_rank=0, has_wkv_norms=False, **sizes)
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "q4_k_m"]) == 0
    _, bindings = read(tmp_path / "out.gguf")
    types = {binding.name: binding.info.type_name for binding in bindings}
    assert types["blk.1.ffn_up.weight"] == types["blk.1.time_mix_key.weight"] == "Q4_K"
    # As llama-quantize leaves them.
    assert {types[f"blk.1.time_mix_{name}.weight"] for name in ("w1", "w2", "v1", "a2")} == {"F32"}
    assert main(["run", str(tmp_path / "out.gguf"), "-p", "the thing", "-n", "3"]) == 0

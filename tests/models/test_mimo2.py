"""MiMo-V2: values of another size than keys, sinks of some layers, dense layers by tensors."""

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

OPTIONS = {"sliding_window": 20, "value_dim": 16, "tied": False}


def test_layers_of_mimo2(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "mimo2", **OPTIONS, n_kv_heads=(4, 4, 2, 4, 4, 2))
    assert [layer.window for layer in config.layers] == [20, 20, 0, 20, 20, 0]
    assert [layer.has_sinks for layer in config.layers] == [True, True, False, True, True, False]
    assert [layer.is_dense for layer in config.layers] == [True, *[False] * 5]
    assert [layer.n_kv_heads for layer in config.layers] == [4, 4, 2, 4, 4, 2]
    assert (config.head_dim, config.value_dim) == (8, 16) and not config.has_like_layers
    assert config.value_scale == pytest.approx(0.6) and config.expert_gate == "sigmoid"
    assert config.has_expert_bias and config.sliding_rope_inv_freq == config.rope_inv_freq
    other = read_tiny(tiny_model, "mimo2", **OPTIONS, rope_base=1e6)
    assert other.sliding_rope_inv_freq != other.rope_inv_freq


def test_a_window_pattern_of_numbers_and_layers_that_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the converter writes it, with entries for three more layers."""
    pattern, n_kv_heads = [0, 1, 1, 1, 1, 0, 1, 1, 1], [2, 4, 4, 4, 4, 2, 4, 4, 4]

    def add_pattern(writer: GGUFWriter, _: object) -> None:
        writer.add_array("mimo2.attention.sliding_window_pattern", pattern)

    def add_head_count_kv(writer: GGUFWriter, _: object) -> None:
        writer.add_array("mimo2.attention.head_count_kv", n_kv_heads)

    def add_block_count(writer: GGUFWriter, _: object) -> None:
        writer.add_uint32("mimo2.block_count", 9)
        writer.add_uint32("mimo2.nextn_predict_layers", 3)

    monkeypatch.setattr(GGUFWriter, "add_sliding_window_pattern", add_pattern)
    monkeypatch.setattr(GGUFWriter, "add_head_count_kv", add_head_count_kv)
    monkeypatch.setattr(GGUFWriter, "add_block_count", add_block_count)

    def add_more(tensors: Tensors) -> None:
        tensors["blk.6.nextn.eh_proj.weight"] = np.zeros((32, 64), np.float32)

    options = {**OPTIONS, "n_kv_heads": tuple(n_kv_heads[:6]), "n_layers": 6}
    config, bindings = read(write_tiny(tmp_path, "mimo2", edit=add_more, **options))
    assert [layer.window for layer in config.layers] == [0, 20, 20, 20, 20, 0]
    assert not any("nextn" in binding.name for binding in bindings)
    pattern[1] = 2
    with pytest.raises(FormatError, match=r"sliding_window_pattern' must say yes or no of every"):
        read(write_tiny(tmp_path, "mimo2", **options))
    pattern.pop()
    with pytest.raises(FormatError, match=r"sliding_window_pattern' has 8 items, but must have 6"):
        read(write_tiny(tmp_path, "mimo2", **options))


def test_dense_layers_have_a_width_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_width(writer: GGUFWriter, _: object) -> None:
        writer.add_uint32("mimo2.feed_forward_length", 24)

    monkeypatch.setattr(GGUFWriter, "add_feed_forward_length", add_width)

    def widen(tensors: Tensors) -> None:
        for name in ("gate", "up", "down"):
            matrix = tensors[f"blk.0.ffn_{name}.weight"]
            size = (32, 24) if name == "down" else (24, 32)
            tensors[f"blk.0.ffn_{name}.weight"] = np.resize(matrix, size)

    config, _ = read(write_tiny(tmp_path, "mimo2", edit=widen, **OPTIONS))
    assert [layer.ffn_dim for layer in config.layers] == [24, *[16] * 5]
    with pytest.raises(FormatError, match=r"'blk.0.ffn_gate.weight' has shape \[32, 16\]"):
        read(write_tiny(tmp_path, "mimo2", **OPTIONS))


def test_files_that_cannot_be(
    tmp_path: Path, read_with_key: Callable[..., DecoderConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(tensors: Tensors) -> None:
        tensors["blk.1.attn_v.weight"] = tensors["blk.1.attn_v.weight"][:-8]

    with pytest.raises(FormatError, match=r"'blk.1.attn_v.weight' has shape \[32, 24\]"):
        read(write_tiny(tmp_path, "mimo2", edit=cut, **OPTIONS))

    def cut_sinks(tensors: Tensors) -> None:
        tensors["blk.1.attn_sinks.weight"] = tensors["blk.1.attn_sinks.weight"][:2]

    with pytest.raises(FormatError, match=r"'blk.1.attn_sinks.weight' has shape \[2\]"):
        read(write_tiny(tmp_path, "mimo2", edit=cut_sinks, **OPTIONS))
    with pytest.raises(FormatError, match=r"'qwen3moe.attention.value_scale' is 0.5, which is not"):
        read_with_key("qwen3moe", lambda w: w.add_float32("qwen3moe.attention.value_scale", 0.5))

    def add_value_length(writer: GGUFWriter, _: object) -> None:
        writer.add_uint32(f"{writer.arch}.attention.value_length", 16)

    monkeypatch.setattr(GGUFWriter, "add_value_length", add_value_length)
    with pytest.raises(FormatError, match="values differ in size from their keys"):
        read(write_tiny(tmp_path, "qwen3moe"))


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "mimo2", **OPTIONS)
    core_config(config)
    for changed, problem in (
        ({"value_dim": 12}, "head_dim = 12 must be a multiple of 8"),
        ({"value_scale": 0.0}, "value_scale = 0 is of plain attention, and positive"),
        ({"output_gate": "per_output"}, "needs keys and values of one size"),
    ):
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, **changed))


def test_a_budget_and_a_quantised_cache(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys and values have types of their own, and layers without a window read sparsely."""
    options = {"n_layers": 3, "model_dim": 64, "n_heads": 4, "head_dim": 64, "value_dim": 32}
    path = str(
        tiny_model(architecture="mimo2", ffn_dim=64, sliding_window=40, tied=False, **options)
    )
    flags = ["-p", "the art of war " * 200, "-n", "3", "--temp", "0"]
    rules = (["headwise", "--budget", "64"], ["h2o"], ["dense"])
    for types in (["-ctk", "q8_0", "-ctv", "q8_0"], ["-ctk", "f16", "-ctv", "q8_0"], []):
        for rule in rules if not types else rules[:1]:
            assert main(["run", path, *flags, *types, "--attention", *rule]) == 0
    quantised = str(tmp_path / "q.gguf")
    assert main(["quantize", path, quantised, "q8_0"]) == 0
    assert main(["run", quantised, *flags]) == 0
    assert main(["run", path, *flags, "--draft", "mtp"]) == 2
    assert "no layer that guesses tokens ahead" in capsys.readouterr().err

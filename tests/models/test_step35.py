"""Step 3.5: limits of what comes out of activations, layers that rotate a half of their heads."""

from __future__ import annotations

import math
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

OPTIONS = {"sliding_window": 20, "tied": False}


def test_layers_of_step35(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "step35", **OPTIONS, n_heads=(4, 8, 4, 4, 8, 4))
    assert [layer.window for layer in config.layers] == [20, 20, 0, 20, 20, 0]
    assert [layer.n_heads for layer in config.layers] == [4, 8, 4, 4, 8, 4]
    assert [layer.is_dense for layer in config.layers] == [True, *[False] * 5]
    assert (config.rotary_dim, len(config.rope_inv_freq)) == (4, 2)
    assert len(config.sliding_rope_inv_freq) == 4
    assert (config.output_gate, config.head_gate, config.expert_gate) == (
        *("per_head", "sigmoid"),
        "sigmoid",
    )


def test_limits_are_of_what_comes_out(tiny_model: TinyModelFactory) -> None:
    """Experts have the limits 0 to 1, the shared one and the dense layer half of 1 to 0."""
    layers = read_tiny(tiny_model, "step35", **OPTIONS).layers

    def silu(x: float) -> float:
        return x / (1.0 + math.exp(-x))

    assert [layer.up_limit for layer in layers] == pytest.approx([0.5, 0.2, 0.4, 0.6, 0.8, 1.0])
    shared = [layer.shared_up_limit for layer in layers]
    assert shared == pytest.approx([0.0, 0.4, 0.3, 0.2, 0.1, 0.0])
    for layer in layers:
        assert silu(layer.gate_limit) == pytest.approx(layer.up_limit, rel=1e-12)
        assert silu(layer.shared_gate_limit) == pytest.approx(layer.shared_up_limit, rel=1e-12)


def test_files_may_lack_limits(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GGUFWriter.add_array
    values: dict[str, list[float]] = {}

    def add_array(writer: GGUFWriter, key: str, array: list[float]) -> None:
        if "swiglu" not in key:
            original(writer, key, array)
        elif key.removeprefix("step35.") in values:
            original(writer, key, values[key.removeprefix("step35.")])

    monkeypatch.setattr(GGUFWriter, "add_array", add_array)
    config, _ = read(write_tiny(tmp_path, "step35", **OPTIONS))
    assert {(layer.gate_limit, layer.shared_gate_limit) for layer in config.layers} == {(0.0, 0.0)}
    values["swiglu_clamp_shexp"] = [0.0] * 5 + [-1.0]
    with pytest.raises(FormatError, match=r"swiglu_clamp_shexp' must hold limits from 0"):
        read(write_tiny(tmp_path, "step35", **OPTIONS))
    values["swiglu_clamp_shexp"] = [7.0] * 7
    with pytest.raises(FormatError, match=r"swiglu_clamp_shexp' has 7 items, but must have 6"):
        read(write_tiny(tmp_path, "step35", **OPTIONS))


def test_files_that_cannot_be(
    tmp_path: Path, read_with_key: Callable[..., DecoderConfig], tiny_model: TinyModelFactory
) -> None:
    with pytest.raises(FormatError, match=r"dimension_count' is 6, half of which is rotated"):
        read(write_tiny(tmp_path, "step35", **OPTIONS, rotary_dim=6))

    def drop(tensors: Tensors) -> None:
        del tensors["blk.1.attn_gate.weight"]

    with pytest.raises(FormatError, match=r"missing: 'blk.1.attn_gate.weight'"):
        read(write_tiny(tmp_path, "step35", edit=drop, **OPTIONS))

    def shorten(tensors: Tensors) -> None:
        tensors["rope_freqs.weight"] = np.ones(2, np.float32)

    with pytest.raises(FormatError, match=r"'rope_freqs.weight' is F32 of shape \[2\]"):
        read(write_tiny(tmp_path, "step35", edit=shorten, rope_scaling="llama3", **OPTIONS))
    with pytest.raises(FormatError, match=r"'qwen3moe.swiglu_clamp_shexp' is 7"):
        read_with_key("qwen3moe", lambda w: w.add_float32("qwen3moe.swiglu_clamp_shexp", 7.0))
    config = read_tiny(tiny_model, "step35", **OPTIONS)
    half = replace(config, layers=(replace(config.layers[0], up_limit=0.0), *config.layers[1:]))
    with pytest.raises(FormatError, match="of a gate that is not there, or of half of it"):
        core_config(half)


def test_a_budget(tiny_model: TinyModelFactory) -> None:
    options = {"n_layers": 3, "model_dim": 64, "n_heads": 4, "head_dim": 32, "ffn_dim": 64}
    path = str(tiny_model(architecture="step35", **OPTIONS, **options))
    flags = ["-p", "the art of war " * 200, "-n", "3", "--temp", "0"]
    for rule in (["headwise", "--budget", "64"], ["h2o"]):
        assert main(["run", path, *flags, "--attention", *rule]) == 0

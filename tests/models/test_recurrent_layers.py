"""Layers with short convolutions, Mamba-2 and delta nets: which there are, and their sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o.errors import FormatError
from edgeh2o.runners.native import NativeModelFile
from tests.models.tiny_file import SHAPE, read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors


def test_layers_of_lfm2(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "lfm2", n_kv_heads=(0, 2, 0, 0, 4, 0), sliding_window=9)
    assert [layer.mixer == "attention" for layer in config.layers] == [0, 1, 0, 0, 1, 0]
    assert [layer.n_kv_heads for layer in config.layers] == [0, 2, 0, 0, 4, 0]
    assert [layer.window for layer in config.layers] == [0, 9, 0, 0, 9, 0]
    assert (config.n_slots, config.n_kv_heads, config.has_like_layers) == (6, 4, False)
    mixture = read_tiny(tiny_model, "lfm2moe", n_dense_layers=2)
    assert [layer.is_dense for layer in mixture.layers] == [True] * 2 + [False] * 4
    assert (mixture.expert_gate, mixture.has_expert_bias) == ("sigmoid", True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_kv_heads": (0,) * 6}, "'lfm2.attention.head_count_kv' leaves no layer with attention"),
        ({"n_conv_taps": 1}, "'lfm2.shortconv.l_cache'"),
        ({"n_conv_taps": 17}, "'lfm2.shortconv.l_cache'"),
    ],
)
def test_layers_of_lfm2_that_cannot_be(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    path = write_tiny(tmp_path, "lfm2", **options)
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_a_router_of_lfm2moe_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_softmax_of_weights(writer: GGUFWriter, gate: object) -> None:
        writer.add_uint32("lfm2moe.expert_gating_func", 3)

    monkeypatch.setattr(GGUFWriter, "add_expert_gating_func", add_softmax_of_weights)
    path = write_tiny(tmp_path, "lfm2moe")
    with pytest.raises(FormatError, match=r"'lfm2moe.expert_gating_func' is 3, but only 2"):
        read(path)


def test_tensors_of_another_kind_of_layer_are_refused(tmp_path: Path) -> None:
    def add_heads(tensors: Tensors) -> None:
        tensors["blk.0.attn_q.weight"] = tensors["blk.1.attn_q.weight"]

    path = write_tiny(tmp_path, "lfm2", edit=add_heads)
    with pytest.raises(FormatError, match=r"does not use: 'blk.0.attn_q.weight'"):
        read(path)


def test_layers_with_mamba2(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "granitehybrid", n_conv_taps=4)
    assert [layer.mixer for layer in config.layers] == ["mamba2", "attention"] * 3
    first = config.layers[0]
    assert (first.n_ssd_heads, first.ssd_head_dim) == (8, 16)
    assert (first.n_ssd_groups, first.ssd_state_dim, first.n_conv_taps) == (2, 32, 4)
    assert (config.n_experts, config.attention_scale) == (6, pytest.approx(0.35))
    assert config.rope_inv_freq == (0.0,) * 4  # not "finetuned"
    assert config.is_recurrent and not config.has_like_layers
    dense = read_tiny(tiny_model, "granitehybrid", n_experts=0, rotates=True)
    assert dense.n_experts == 0 and dense.rope_inv_freq[0] == 1.0
    assert all(layer.is_dense for layer in dense.layers)

    config = read_tiny(tiny_model, "falcon-h1")
    assert [layer.mixer for layer in config.layers] == ["attention_mamba2"] * 6
    assert [layer.n_kv_heads for layer in config.layers] == [2] * 6
    assert config.is_recurrent and config.layers[0].n_ssd_heads == 8

    config = read_tiny(tiny_model, "nemotron_h")
    assert [layer.mixer for layer in config.layers] == ["mamba2", "attention", "none"] * 2
    assert [layer.ffn_dim for layer in config.layers] == [0, 0, 16] * 2
    assert not any(layer.has_rope for layer in config.layers)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_ssd_groups": 3}, "'granitehybrid.ssm.time_step_rank' is 8, which is not a multiple"),
        ({"ssd_head_dim": 2000}, "'granitehybrid.ssm.inner_size' is 16000, but must be 8 "),
        ({"n_conv_taps": 17}, "'granitehybrid.ssm.conv_kernel'"),
        ({"n_kv_heads": (0,) * 6}, "'granitehybrid.attention.head_count_kv' leaves no layer"),
    ],
)
def test_layers_with_mamba2_that_cannot_be(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    path = write_tiny(tmp_path, "granitehybrid", **options)
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_layers_with_mamba1(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    config = read_tiny(tiny_model, "jamba", n_conv_taps=4)
    assert [layer.mixer for layer in config.layers] == ["mamba1", "attention"] * 3
    first = config.layers[0]
    assert (first.n_scan_channels, first.scan_state_dim, first.scan_step_rank) == (64, 16, 32)
    assert (first.n_conv_taps, first.n_heads, first.has_rope) == (4, 0, False)
    assert [layer.is_dense for layer in config.layers] == [True, False] * 3
    assert (config.n_experts, config.normalises_experts) == (6, False)
    assert config.is_recurrent and not config.has_like_layers

    def drop_experts(tensors: Tensors) -> None:
        """Which layers have some is what tensors say, layer by layer."""
        for name in [name for name in tensors if name.startswith("blk.3.ffn_")]:
            if "norm" not in name:
                del tensors[name]
        for name in ("gate", "up", "down"):
            tensors[f"blk.3.ffn_{name}.weight"] = tensors[f"blk.2.ffn_{name}.weight"]

    path = write_tiny(tmp_path, "jamba", edit=drop_experts)
    layers = read(path)[0].layers
    assert [layer.is_dense for layer in layers] == [True, False, True, True, True, False]


def test_layers_of_mamba(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "mamba")
    assert [layer.mixer for layer in config.layers] == ["mamba1"] * 6
    assert [layer.ffn_dim for layer in config.layers] == [0] * 6
    assert (config.n_heads, config.n_slots, config.head_dim) == (0, 0, 0)
    assert config.layers[0].scan_norms == "none"
    normed = read_tiny(tiny_model, "mamba", has_scan_norms=True)
    assert normed.layers[0].scan_norms == "plain"
    assert read_tiny(tiny_model, "jamba").layers[0].scan_norms == "weighted"


def test_layers_of_mamba2_alone(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "mamba2")
    assert [layer.mixer for layer in config.layers] == ["mamba2"] * 6
    assert [layer.ffn_dim for layer in config.layers] == [0] * 6
    assert (config.n_heads, config.n_slots, config.head_dim) == (0, 0, 0)


@pytest.mark.parametrize("n_experts", [0, 1])
def test_a_jamba_of_one_network_is_dense(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_experts: int
) -> None:
    """Some converters count the one network, as that of Jamba Reasoning 3B does."""

    def add_block_count(writer: GGUFWriter, n_layers: int) -> None:
        writer.add_uint32("jamba.block_count", n_layers)
        if n_experts:
            writer.add_uint32("jamba.expert_count", n_experts)
            writer.add_uint32("jamba.expert_used_count", n_experts)

    monkeypatch.setattr(GGUFWriter, "add_block_count", add_block_count)
    config, _ = read(write_tiny(tmp_path, "jamba", n_experts=0))
    assert config.n_experts == 0 and all(layer.is_dense for layer in config.layers)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_scan_channels": 40}, r"a Mamba layer has 40 channels; a multiple of 16"),
        ({"scan_state_dim": 8}, r"the state of a channel of a Mamba layer has 8 numbers"),
        ({"scan_state_dim": 2**11}, "'jamba.ssm.state_size'"),
        ({"n_conv_taps": 1}, "'jamba.ssm.conv_kernel'"),
        ({"n_kv_heads": (0,) * 6}, "'jamba.attention.head_count_kv' leaves no layer with"),
    ],
)
def test_layers_with_mamba1_that_cannot_be(
    tmp_path: Path, options: dict[str, object], problem: str
) -> None:
    path = write_tiny(tmp_path, "jamba", **options)
    with pytest.raises(FormatError, match=problem), NativeModelFile(path) as file:
        file.load()


def test_a_norm_of_one_group_may_have_one_dimension(tmp_path: Path) -> None:
    """As ggml writes it when a file is quantised: without dimensions of 1 at the end."""

    def flatten_norms(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("ssm_norm.weight")]:
            tensors[name] = tensors[name][0]

    path = write_tiny(tmp_path, "granitehybrid", edit=flatten_norms, n_ssd_groups=1)
    names = [item.name for item in read(path)[1]]
    assert names.count("blk.0.ssm_norm.0.weight") == 1
    path = write_tiny(tmp_path, "granitehybrid", edit=flatten_norms, n_ssd_groups=2)
    with pytest.raises(FormatError, match=r"'blk.0.ssm_norm.weight' has shape"):
        read(path)


def test_a_layer_of_nemotron_h_has_one_branch(tmp_path: Path) -> None:
    options = {"n_kv_heads": (0, 2, 2, 0, 2, 0), "ffn_dim": (0, 0, 16, 0, 0, 16)}
    path = write_tiny(tmp_path, "nemotron_h", **options)
    with pytest.raises(FormatError, match=r"layer 2 has both KV heads .* and a metadata key"):
        read(path)


def test_other_norms_may_name_the_epsilon_of_nemotron_h(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GGUFWriter, "add_layer_norm_rms_eps", lambda *_: None)
    path = write_tiny(tmp_path, "nemotron_h", norm_eps=0.01)
    assert read(path)[0].norm_eps == pytest.approx(0.01)
    path = write_tiny(tmp_path, "falcon-h1", norm_eps=0.01)
    with pytest.raises(FormatError, match="layer_norm_rms_epsilon"):
        read(path)


def test_layers_of_qwen35(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "qwen35", n_conv_taps=4)
    assert [layer.mixer for layer in config.layers] == ["delta_net", "attention"] * 3
    assert [layer.n_kv_heads for layer in config.layers] == [0, 2] * 3
    first = config.layers[0]
    assert (first.n_delta_key_heads, first.n_delta_value_heads, first.delta_head_dim) == (2, 4, 32)
    assert (first.n_conv_taps, first.has_grouped_delta_heads) == (4, False)
    assert config.output_gate == "of_queries" and config.is_recurrent and not config.has_like_layers
    assert read_tiny(tiny_model, "qwen3next").layers[0].has_grouped_delta_heads


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        ({}, "ssm.inner_size", "must be ssm.time_step_rank"),
        ({"n_delta_value_heads": 3}, None, "'qwen35.ssm.time_step_rank' is 3, which is not"),
        ({"n_conv_taps": 1}, None, "'qwen35.ssm.conv_kernel'"),
        ({"n_layers": 1}, None, "'qwen35.full_attention_interval' leaves no layer with attention"),
        ({}, "attention.recurrent_layers", "'qwen35.attention.recurrent_layers' is not supported"),
    ],
)
def test_layers_of_qwen35_that_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
    key: str | None,
    problem: str,
) -> None:
    def add_inner_size(writer: GGUFWriter, size: int) -> None:
        writer.add_uint32("qwen35.ssm.inner_size", size + (key == "ssm.inner_size"))
        if key == "attention.recurrent_layers":
            writer.add_array(f"qwen35.{key}", [True] * 6)

    monkeypatch.setattr(GGUFWriter, "add_ssm_inner_size", add_inner_size)
    path = write_tiny(tmp_path, "qwen35", **options)
    with pytest.raises(FormatError, match=problem):
        read(path)


def test_rows_of_gates_are_parted_from_those_of_queries(tiny_model: TinyModelFactory) -> None:
    bindings = {item.name: item for item in read(tiny_model(architecture="qwen3next", **SHAPE))[1]}
    order = np.array(bindings["blk.1.attn_q.weight"].row_order).reshape(2, 4, 8)
    heads = np.arange(64).reshape(4, 2, 8)  # by turns: a query, a gate
    np.testing.assert_array_equal(order, heads[:, ::-1].transpose(1, 0, 2))
    gates = np.array(bindings["blk.0.ssm_ba.weight"].row_order)
    np.testing.assert_array_equal(gates, [0, 1, 4, 5, 2, 3, 6, 7])


def test_layers_that_guess_ahead_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_drafting(tensors: Tensors) -> None:
        tensors["blk.5.nextn.enorm.weight"] = tensors["blk.1.attn_norm.weight"]

    def add_block_count(writer: GGUFWriter, n_layers: int) -> None:
        writer.add_uint32("qwen35.block_count", n_layers)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)

    monkeypatch.setattr(GGUFWriter, "add_block_count", add_block_count)
    path = write_tiny(tmp_path, "qwen35", edit=add_drafting)
    config, bindings = read(path)
    assert config.n_layers == 5
    assert not [item.name for item in bindings if item.name.startswith("blk.5.")]

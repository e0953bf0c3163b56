"""Ling 3.0 and Kimi Linear: delta nets whose rows decay by themselves, beside latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFWriter

from edgeh2o.errors import FormatError
from edgeh2o.model_config import DecoderConfig
from edgeh2o.runners.core_config import core_config
from tests.models.tiny_file import changed_key, read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors


def test_delta_nets_whose_rows_decay_by_themselves(
    tiny_model: TinyModelFactory, read_with_key: Callable[..., DecoderConfig]
) -> None:
    config = read_tiny(tiny_model, "bailingmoe3")
    first, second = config.layers[:2]
    assert (first.mixer, first.n_heads, second.mixer, second.n_heads) == (
        *("delta_net", 0),
        *("attention", 4),
    )
    assert (first.n_delta_key_heads, first.n_delta_value_heads, first.delta_head_dim) == (4, 4, 32)
    assert (first.delta_log_floor, second.delta_log_floor) == (-5.0, 0.0)
    assert first.has_row_decays and not second.has_row_decays and first.delta_gate_rank == 0
    assert config.latent is not None and config.output_gate == "per_head"
    assert config.is_recurrent and config.layers[0].n_kv_heads == 0
    read_with_key("bailingmoe3", lambda w: w.add_array("bailingmoe3.swiglu_clamp_exp", [0.0] * 6))


def test_those_of_kimi_linear(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_tiny(tiny_model, "kimi-linear", q_rank=0)
    first, second = config.layers[:2]
    assert first.has_row_decays and not second.has_row_decays
    assert (first.delta_log_floor, first.delta_gate_rank, first.delta_head_dim) == (0.0, 32, 32)
    assert not any(layer.has_rope for layer in config.layers)
    assert config.latent is not None and config.output_gate == "none"
    assert (config.expert_gate, config.normalises_experts) == ("sigmoid", True)
    # What a file does not say of its experts.
    monkeypatch.setattr(GGUFWriter, "add_expert_weights_norm", lambda *_: None)
    assert read(write_tiny(tmp_path, "kimi-linear"))[0].normalises_experts
    assert not read(write_tiny(tmp_path, "bailingmoe3"))[0].normalises_experts


def test_vectors_of_gates_that_are_missing(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["blk.0.ssm_f_b.weight"]

    with pytest.raises(FormatError, match=r"missing: 'blk.0.ssm_f_b.weight'"):
        read(write_tiny(tmp_path, "kimi-linear", edit=drop))

    def narrow(tensors: Tensors) -> None:
        tensors["blk.0.ssm_g_a.weight"] = tensors["blk.0.ssm_g_a.weight"][:16]

    with pytest.raises(FormatError, match=r"'blk.0.ssm_g_a.weight' has shape"):
        read(write_tiny(tmp_path, "kimi-linear", edit=narrow))


def test_sizes_of_other_delta_nets_with_row_decays(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "bailingmoe3")

    def change(**changes: float) -> DecoderConfig:
        return replace(config, layers=(replace(config.layers[0], **changes), *config.layers[1:]))

    for changes, problem in (
        ({"n_delta_key_heads": 2}, "4 heads with 2 heads of keys"),
        ({"has_row_decays": False}, "log_floor = -5 and gate_rank = 0 of heads that decay as a"),
        ({"delta_log_floor": 1.0}, "log_floor = 1 "),
    ):
        with pytest.raises(FormatError, match=problem):
            core_config(change(**changes))


def test_arrays_may_have_entries_of_layers_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GGUFWriter.add_head_count_kv

    def add(writer: GGUFWriter, numbers: list[int]) -> None:
        writer.add_uint32("bailingmoe3.nextn_predict_layers", 1)
        original(writer, [*numbers[:-1], 0, 1])

    monkeypatch.setattr(GGUFWriter, "add_head_count_kv", add)
    monkeypatch.setattr(
        GGUFWriter, "add_block_count", lambda w, n: w.add_uint32("bailingmoe3.block_count", n + 1)
    )
    config = read(write_tiny(tmp_path, "bailingmoe3", n_layers=3))[0]
    assert [layer.mixer for layer in config.layers] == ["delta_net", "attention", "delta_net"]


@pytest.mark.parametrize(
    ("add", "problem"),
    [
        (lambda w: w.add_array("bailingmoe3.swiglu_clamp_exp", [7.0] * 6), "swiglu_clamp_exp'"),
        (lambda w: w.add_array("bailingmoe3.swiglu_clamp_shexp", [7.0] * 6), "swiglu_clamp_shexp'"),
        (lambda w: w.add_array("bailingmoe3.rope.dimension_sections", [2, 1, 1, 0]), "multimodal"),
    ],
)
def test_what_bailingmoe3_does_not_have(
    read_with_key: Callable[..., DecoderConfig], add: Callable[[GGUFWriter], None], problem: str
) -> None:
    with pytest.raises(FormatError, match=problem):
        read_with_key("bailingmoe3", add)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("safe_gate", False, "without a lower bound"),
        ("gate_lower_bound", 0.0, "is 0"),
        ("head_dim", 0, "is 0"),
    ],
)
def test_bad_keys_of_delta_nets_with_row_decays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: float, problem: str
) -> None:
    with changed_key(monkeypatch, f"bailingmoe3.kda.{key}", value):
        path = write_tiny(tmp_path, "bailingmoe3")
    with pytest.raises(FormatError, match=rf"bailingmoe3\.kda\.{key}'.*{problem}"):
        read(path)

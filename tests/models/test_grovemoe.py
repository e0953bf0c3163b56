"""GroveMoE: experts that their neighbours share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFWriter

from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.runners.core_config import core_config
from tests.models.tiny_file import read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors


def test_experts_of_grovemoe(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "grovemoe", n_experts=8)
    assert (config.n_experts, config.n_experts_used, config.expert_gate) == (8, 2, "softmax")
    assert (config.adjugate_ffn_dim, config.n_adjugate_sharers) == (32, 2)
    assert config.adjugate_scale == pytest.approx(0.4) and config.normalises_experts
    _, bindings = read(tiny_model(architecture="grovemoe", n_experts=8, n_adjugate_sharers=4))
    names = {binding.name for binding in bindings if "_chexps." in binding.name}
    assert len(names) == 3 * 2 * 3 and "blk.2.ffn_down_chexps.1.weight" in names


def test_keys_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method, key, value, problem in (
        ("add_experts_per_group", "experts_per_group", 4, "is 4, but 6 experts do not make"),
        ("add_experts_per_group", "experts_per_group", 0, "is 0"),
        ("add_experts_per_group", None, None, "'grovemoe.experts_per_group' .* is missing"),
        ("add_expert_group_scale", "expert_group_scale", -1.0, "is -1"),
        ("add_expert_group_scale", None, None, "'grovemoe.expert_group_scale' .* is missing"),
        ("add_expert_chunk_feed_forward_length", None, None, "feed_forward_length' .* is missing"),
    ):

        def add(
            writer: GGUFWriter,
            _: object,
            key: str | None = key,
            value: float | None = value,
        ) -> None:
            if isinstance(value, int):
                writer.add_uint32(f"grovemoe.{key}", value)
            elif value is not None:
                writer.add_float32(f"grovemoe.{key}", value)

        with monkeypatch.context() as patch:
            patch.setattr(GGUFWriter, method, add)
            with pytest.raises(FormatError, match=problem):
                read(write_tiny(tmp_path, "grovemoe"))


def test_tensors_that_cannot_be(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["blk.1.ffn_up_chexps.weight"]

    with pytest.raises(FormatError, match=r"missing: 'blk.1.ffn_up_chexps.weight'"):
        read(write_tiny(tmp_path, "grovemoe", edit=drop))

    def cut(tensors: Tensors) -> None:
        name = "blk.1.ffn_up_chexps.weight"
        tensors[name] = tensors[name][:2]

    with pytest.raises(FormatError, match=r"'blk.1.ffn_up_chexps.weight' has shape .* 2\]"):
        read(write_tiny(tmp_path, "grovemoe", edit=cut))


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "grovemoe")
    core_config(config)
    with pytest.raises(FormatError, match="an expert is shared by 4 of 6 of a plain mixture"):
        core_config(replace(config, n_adjugate_sharers=4))
    with pytest.raises(FormatError, match="an expert is shared by 2 of 6 of a plain mixture"):
        core_config(replace(config, scales_expert_inputs=True))


def test_a_quantised_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    model = tiny_model(architecture="grovemoe", n_layers=2, ffn_dim=256, adjugate_ffn_dim=256)
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "q4_k_m"]) == 0
    _, bindings = read(tmp_path / "out.gguf")
    types = {binding.name: binding.info.type_name for binding in bindings}
    assert types["blk.1.ffn_up_chexps.2.weight"] == types["blk.1.ffn_up_exps.5.weight"] == "Q4_K"
    assert types["blk.1.ffn_gate_inp.weight"] == "F32"
    assert main(["run", str(tmp_path / "out.gguf"), "-p", "the thing", "-n", "3"]) == 0

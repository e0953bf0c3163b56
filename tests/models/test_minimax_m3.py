"""MiniMax M3: indexers of layers with experts, which choose blocks for every KV head."""

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


def test_layers_of_minimax_m3(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "minimax-m3", n_dense_layers=2)
    assert [layer.is_dense for layer in config.layers] == [True, True, *[False] * 4]
    assert [layer.index_heads for layer in config.layers] == [0, 0, 2, 2, 2, 2]
    layer = config.layers[-1]
    assert (layer.index_top_k, layer.index_block_tokens, layer.index_local_blocks) == (24, 4, 1)
    assert layer.index_per_head and layer.index_key_dim == 32
    assert config.activation == "silu_clamped" and config.index_top_k == 24
    assert config.expert_gate == "sigmoid" and config.expert_scale == pytest.approx(1.7)


def test_keys_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "minimax-m3.attention.indexer"
    original = GGUFWriter.add_uint32
    for key, value, problem in (
        ("head_count", 4, r"indexer\.head_count' is 4, but layers have 2 KV heads"),
        ("key_length", 6, r"indexer\.key_length' is 6"),
        ("top_k", 0, r"indexer\.top_k' is 0"),
        ("block_size", 0, r"indexer\.block_size' is 0"),
        ("block_size", 2**20, r"indexer\.block_size' is 1048576"),
        ("block_size", None, r"indexer\.block_size' .* is missing"),
        ("local_blocks", 7, r"indexer\.local_blocks' is 7"),
        ("local_blocks", None, r"indexer\.local_blocks' .* is missing"),
    ):

        def add_uint32(
            writer: GGUFWriter,
            full: str,
            number: int,
            changed: str = f"{name}.{key}",
            value: int | None = value,
        ) -> None:
            if full != changed:
                original(writer, full, number)
            elif value is not None:
                original(writer, full, value)

        with monkeypatch.context() as patch:
            patch.setattr(GGUFWriter, "add_uint32", add_uint32)
            with pytest.raises(FormatError, match=problem):
                read(write_tiny(tmp_path, "minimax-m3"))


def test_tensors_that_cannot_be(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["blk.2.indexer.k_norm.weight"]

    with pytest.raises(FormatError, match=r"missing: 'blk.2.indexer.k_norm.weight'"):
        read(write_tiny(tmp_path, "minimax-m3", edit=drop))

    def add(tensors: Tensors) -> None:
        tensors["blk.0.indexer.k_norm.weight"] = tensors["blk.2.indexer.k_norm.weight"]

    with pytest.raises(FormatError, match=r"does not use: 'blk.0.indexer.k_norm.weight'"):
        read(write_tiny(tmp_path, "minimax-m3", edit=add))

    def cut(tensors: Tensors) -> None:
        tensors["blk.2.indexer.q_proj.weight"] = tensors["blk.2.indexer.q_proj.weight"][:32]

    with pytest.raises(FormatError, match=r"'blk.2.indexer.q_proj.weight' has shape \[32, 32\]"):
        read(write_tiny(tmp_path, "minimax-m3", edit=cut))


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "minimax-m3")
    core_config(config)
    for changes in (
        {"index_heads": 4},
        {"index_local_blocks": 7},
        {"index_block_tokens": 0},
        {"index_block_tokens": 5},
        {"window": 20},
    ):
        layers = (*config.layers[:-1], replace(config.layers[-1], **changes))
        with pytest.raises(FormatError, match="an indexer"):
            core_config(replace(config, layers=layers))


def test_rules_beside_it_are_refused_by_name(
    tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = {"n_layers": 2, "model_dim": 64, "n_heads": 4, "head_dim": 32, "ffn_dim": 64}
    path = str(tiny_model(architecture="minimax-m3", **options))
    flags = ["-p", "the art of war " * 40, "-n", "4", "--temp", "0"]
    assert main(["run", path, *flags]) == 0
    assert main(["run", path, *flags, "--attention", "h2o"]) == 2
    message = capsys.readouterr().err
    assert "queries of this model (minimax-m3) read what its own indexer chooses" in message
    quantised = str(tmp_path / "q.gguf")
    assert main(["quantize", path, quantised, "q4_k_m"]) == 0
    _, bindings = read(Path(quantised))
    types = {binding.name: binding.info.type_name for binding in bindings}
    assert types["blk.1.indexer.q_proj.weight"] == "F32"
    assert main(["run", quantised, *flags]) == 0

"""dots3-note: latent attention whose layers with a window have other heads, and no indexer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.runners.core_config import core_config
from tests.models.tiny_file import changed_key, read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors

OPTIONS = {"sliding_window": 20, "n_heads": (4, 2, 4, 4, 2, 4)}


def test_layers_of_dots3note(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "dots3note", **OPTIONS)
    assert [layer.window for layer in config.layers] == [20, 20, 0, 20, 20, 0]
    assert [layer.n_heads for layer in config.layers] == [4, 2, 4, 4, 2, 4]
    assert {layer.n_kv_heads for layer in config.layers} == {1}
    assert [layer.index_heads for layer in config.layers] == [0, 0, 8, 0, 0, 8]
    assert config.latent is not None and config.has_latent_key_norm
    assert (config.latent.rank, config.latent.nope_dim, config.latent.value_dim) == (48, 16, 24)
    first, full = config.layers[0], config.layers[2]
    assert first.latent is not None and full.latent is None and not first.index_top_k
    assert (first.latent.rank, first.latent.nope_dim, first.latent.value_dim) == (32, 24, 16)
    assert (config.head_dim_of(first), config.value_dim_of(first)) == (48, 32)
    assert (config.head_dim_of(full), config.value_dim_of(full)) == (64, 48)
    assert first.attention_scale == pytest.approx(40**-0.5)
    assert config.attention_scale == pytest.approx(32**-0.5)


def test_keys_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value, problem in (
        ("kv_lora_rank_swa", 0, r"kv_lora_rank_swa' is 0"),
        ("kv_lora_rank_swa", 24, r"'blk.0.attn_kv_a_norm.weight' has shape"),
        ("key_length_mla_swa", 16, r"key_length_mla_swa' is 16"),
        ("value_length_mla_swa", None, r"value_length_mla_swa' .* is missing"),
        ("indexer.types", [True] * 6, "must name the layers without a window"),
        ("indexer.types", [False] * 3, "has 3 items, but must have 6"),
    ):
        with changed_key(monkeypatch, f"dots3note.attention.{key}", value):
            path = write_tiny(tmp_path, "dots3note", **OPTIONS)
        with pytest.raises(FormatError, match=problem):
            read(path)


def test_tensors_that_cannot_be(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["blk.1.attn_k_norm.weight"]

    with pytest.raises(FormatError, match=r"missing: 'blk.1.attn_k_norm.weight'"):
        read(write_tiny(tmp_path, "dots3note", edit=drop, **OPTIONS))

    def add(tensors: Tensors) -> None:
        tensors["blk.1.indexer.proj.weight"] = tensors["blk.2.indexer.proj.weight"]

    with pytest.raises(FormatError, match=r"does not use: 'blk.1.indexer.proj.weight'"):
        read(write_tiny(tmp_path, "dots3note", edit=add, **OPTIONS))


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "dots3note", **OPTIONS)
    core_config(config)
    layers = (replace(config.layers[0], latent=None), *config.layers[1:])
    with pytest.raises(FormatError, match="latent attention has one KV head, whose rows are"):
        core_config(replace(config, layers=layers))
    with pytest.raises(FormatError, match="may have a gate of every head, and no other"):
        core_config(replace(config, output_gate="per_output"))


def test_answers(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"n_layers": 3, "model_dim": 64, "n_heads": 4, "head_dim": 32, "ffn_dim": 64}
    options |= {"kv_rank": 64, "q_rank": 64, "nope_dim": 32, "sliding_nope_dim": 32}
    options |= {"value_dim": 32, "sliding_value_dim": 32, "sliding_window": 20}
    path = str(tiny_model(architecture="dots3note", **options))
    flags = ["-p", "the art of war " * 40, "-n", "4", "--temp", "0"]
    assert main(["run", path, *flags]) == 0
    assert main(["run", path, *flags, "--attention", "h2o"]) == 2
    message = capsys.readouterr().err
    assert "queries of this model (dots3note) read what its own indexer chooses" in message
    quantised = str(tmp_path / "q.gguf")
    assert main(["quantize", path, quantised, "q8_0"]) == 0
    assert main(["run", quantised, *flags]) == 0

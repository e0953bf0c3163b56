"""Files of plamo2: Mamba-2 that selects by its channels, and heads with norms of their own."""

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

SSD = (
    *("n_conv_taps", "n_ssd_heads", "ssd_head_dim", "n_ssd_groups"),
    *("ssd_state_dim", "ssd_step_rank"),
)
HEADS = {"head_dim": 16, "n_kv_heads": (0, 2, 0, 1, 0, 1)}


def test_layers_of_plamo2(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "plamo2", **HEADS)
    assert [layer.mixer for layer in config.layers] == ["mamba2", "attention"] * 3
    assert [layer.n_heads for layer in config.layers] == [0, 4] * 3
    first = config.layers[0]
    assert (first.n_ssd_heads, first.ssd_head_dim, first.n_ssd_groups) == (8, 16, 1)
    assert (first.ssd_state_dim, first.ssd_step_rank) == (32, 64)
    assert (config.qk_norm, config.norm_placement, config.rotary_dim) == ("own_head", "both", 16)
    wide = read_tiny(tiny_model, "plamo2", model_dim=2048, n_layers=2)
    assert wide.layers[0].ssd_step_rank == 128


def test_a_head_of_keys_may_have_a_norm_of_one_dimension(tmp_path: Path) -> None:
    """As ggml writes it when a file is quantised: without dimensions of 1 at the end."""

    def flatten(tensors: Tensors) -> None:
        name = "blk.1.attn_k_norm.weight"
        tensors[name] = tensors[name][0]

    path = write_tiny(tmp_path, "plamo2", edit=flatten, n_kv_heads=1)
    assert "blk.1.attn_k_norm.weight" in [item.name for item in read(path)[1]]
    path = write_tiny(tmp_path, "plamo2", edit=flatten, n_kv_heads=2)
    with pytest.raises(FormatError, match=r"'blk.1.attn_k_norm.weight' has shape"):
        read(path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_kv_heads": (0,) * 6}, "'plamo2.attention.head_count_kv' leaves no layer with"),
        ({"n_conv_taps": 1}, "'plamo2.ssm.conv_kernel'"),
        ({"ssd_head_dim": 2000}, "'plamo2.ssm.inner_size' is 16000, but must be 8 "),
        ({"ssd_state_dim": 2**13}, "'plamo2.ssm.state_size'"),
    ],
)
def test_layers_that_cannot_be(tmp_path: Path, options: dict[str, object], problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        read(write_tiny(tmp_path, "plamo2", **options))


def test_keys_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_group_count(writer: GGUFWriter, _: int) -> None:
        writer.add_uint32("plamo2.ssm.group_count", 2)

    with monkeypatch.context() as patch:
        patch.setattr(GGUFWriter, "add_ssm_group_count", add_group_count)
        with pytest.raises(FormatError, match=r"'plamo2.ssm.group_count' is 2, but only 0"):
            read(write_tiny(tmp_path, "plamo2"))

    def add_head_count(writer: GGUFWriter, _: list[int]) -> None:
        writer.add_array("plamo2.attention.head_count", [0] * 6)

    monkeypatch.setattr(GGUFWriter, "add_head_count", add_head_count)
    with pytest.raises(FormatError):
        core_config(read(write_tiny(tmp_path, "plamo2"))[0])


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "plamo2", **HEADS)
    mamba, attention = config.layers[:2]
    for layer, problem in (
        (replace(mamba, n_ssd_groups=2), "rates of a Mamba-2 layer with 2 groups"),
        (replace(mamba, ssd_step_rank=2**17), "rates of a Mamba-2 layer with 1 groups"),
        (
            replace(
                attention,
                mixer="attention_mamba2",
                **{name: getattr(mamba, name) for name in SSD},
            ),
            "rates that are made behind a convolution, beside attention",
        ),
    ):
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, layers=(layer, *config.layers[1:])))


def test_a_quantised_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    sizes = {"model_dim": 256, "ffn_dim": 256, "n_layers": 2, "n_ssd_heads": 16}
    model = tiny_model(architecture="plamo2", **sizes)
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "q4_k_m"]) == 0
    _, bindings = read(tmp_path / "out.gguf")
    types = {binding.name: binding.info.type_name for binding in bindings}
    assert types["blk.0.ssm_in.weight"] == types["blk.0.ssm_x.weight"] == "Q4_K"
    assert types["blk.1.attn_q_norm.weight"] == types["blk.0.ssm_conv1d.weight"] == "F32"
    assert main(["run", str(tmp_path / "out.gguf"), "-p", "the thing", "-n", "3"]) == 0

"""Layers that are gone through several times, with the same weights (Nanbeige 4.2, HRM)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFWriter

from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.layer_config import own_layers
from edgeh2o.model_config import DecoderConfig
from edgeh2o.runners.core_config import core_config
from edgeh2o.runners.native import NativeModelFile
from tests.models.tiny_file import changed_key, read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory


def test_layers_of_all_passes(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "nanbeige", n_loops=3)
    assert (config.n_layers, len(config.layers), len(config.own_layers)) == (18, 18, 6)
    assert config.passes == (0, 0, 0) and config.norms_passes
    assert [config.own_layer(layer) for layer in (0, 5, 6, 17)] == [0, 5, 0, 5]
    assert not read_tiny(tiny_model, "nanbeige", n_loops=2, skips_loop_norm=True).norms_passes
    once = read_tiny(tiny_model, "nanbeige")
    assert once.passes == () and not once.norms_passes and once.own_layer(5) == 5


def test_layers_of_several_stacks(
    tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_tiny(tiny_model, "nanbeige")
    first, second = (replace(config.layers[0], window=width) for width in (0, 7))
    layers = (*(first,) * 4, *(second,) * 2, *(first,) * 2)
    config = replace(config, layers=layers, passes=(0, 0, 1, 0))
    assert own_layers(layers, config.passes) == (first, first, second, second)
    assert [config.own_layer(layer) for layer in range(8)] == [0, 1, 0, 1, 2, 3, 0, 1]
    core_config(config)
    monkeypatch.setattr(DecoderConfig, "own_layers", property(lambda own: own.layers))
    for passes, problem in (
        ((0, 2), "no pass goes through the layers from 2 on"),
        ((0, 3), "6 layers in 4 stacks"),
        ((0, 2**62), "6 layers in"),
    ):
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, layers=(first,) * 6, passes=passes))


@pytest.mark.parametrize(("n_loops", "problem"), [(0, "is 0"), (86, "is 86, but .* 1 to 85")])
def test_loops_that_cannot_be(tmp_path: Path, n_loops: int, problem: str) -> None:
    with pytest.raises(FormatError, match=f"'nanbeige.num_loops' {problem}"):
        read(write_tiny(tmp_path, "nanbeige", n_loops=n_loops))


def test_a_file_without_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GGUFWriter, "add_bool", lambda *_, **__: None)
    config = read(write_tiny(tmp_path, "nanbeige", n_loops=2))[0]
    assert config.norms_passes


def test_weights_are_held_once(tiny_model: TinyModelFactory) -> None:
    once, thrice = (tiny_model(architecture="nanbeige", n_loops=n) for n in (1, 3))
    n_bytes = []
    for path in (once, thrice):
        with NativeModelFile(path) as file:
            n_bytes.append(file.load().weight_bytes)
    assert n_bytes[0] == n_bytes[1] > 0


def test_a_quantised_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    model = tiny_model(architecture="nanbeige", n_loops=2)
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "q4_k_m"]) == 0
    config, bindings = read(tmp_path / "out.gguf")
    assert config.passes == (0, 0)
    assert {b.info.type_name for b in bindings if "blk." in b.name and "norm" not in b.name} == {
        "Q4_K",
        "Q6_K",
    }


def test_cycles_of_two_stacks(tiny_model: TinyModelFactory) -> None:
    sizes = {"n_layers": 2, "n_high_cycles": 2, "n_low_cycles": 3}
    config = read_tiny(tiny_model, "hrm_text", **sizes)
    assert config.passes == (0, 0, 0, 1) * 2 and config.has_two_states
    assert not config.norms_passes  # their norms are those of the states
    assert (len(config.layers), len(config.own_layers)) == (16, 4)
    assert [config.own_layer(layer) for layer in (0, 5, 6, 7, 8, 15)] == [0, 1, 2, 3, 0, 3]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("block_count", 9, "'hrm_text.block_count' is 9, but 2 cycles of 1 passes"),
        ("hrm.l_cycles", 2, "'hrm_text.block_count' is 8, but 2 cycles of 2 passes"),
        ("hrm.h_cycles", 0, "'hrm_text.hrm.h_cycles' is 0"),
        ("hrm.layers_per_stack", 2**31, "'hrm_text.hrm.layers_per_stack' is 2147483648"),
        ("hrm.l_cycles", None, r"'hrm_text.hrm.l_cycles' \(an integer\) is missing"),
    ],
)
def test_cycles_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: int | None, problem: str
) -> None:
    with changed_key(monkeypatch, f"hrm_text.{key}", value):
        path = write_tiny(tmp_path, "hrm_text", n_layers=2)
    with pytest.raises(FormatError, match=f"metadata key {problem}"):
        read(path)


def test_states_that_cannot_be(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "hrm_text", n_layers=1)
    layer = config.layers[0]
    core_config(config)
    for passes, more in (((), {}), ((1, 0), {}), ((0, 0), {}), ((0, 1), {"norms_passes": True})):
        n = len(passes) or 2
        with pytest.raises(FormatError, match="the states of two stacks that there are not"):
            core_config(replace(config, layers=(layer,) * n, passes=passes, **more))

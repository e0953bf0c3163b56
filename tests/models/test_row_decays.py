"""Ling 3.0: delta nets whose rows decay by themselves, beside latent attention with gates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter

from edgeh2o.errors import FormatError
from edgeh2o.model_config import DecoderConfig
from tests.models.tiny_file import read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory


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
    assert config.latent is not None and config.output_gate == "per_head"
    assert config.is_recurrent and config.layers[0].n_kv_heads == 0
    read_with_key("bailingmoe3", lambda w: w.add_array("bailingmoe3.swiglu_clamp_exp", [0.0] * 6))


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
    kind = {"safe_gate": "bool", "head_dim": "uint32"}.get(key, "float32")
    original = getattr(GGUFWriter, f"add_{kind}")

    def add(writer: GGUFWriter, name: str, given: float) -> None:
        original(writer, name, value if name.endswith(f".kda.{key}") else given)

    monkeypatch.setattr(GGUFWriter, f"add_{kind}", add)
    path = write_tiny(tmp_path, "bailingmoe3")
    with pytest.raises(FormatError, match=rf"bailingmoe3\.kda\.{key}'.*{problem}"):
        read(path)

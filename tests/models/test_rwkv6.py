"""RWKV-6: what files say of layers whose inputs have parts of the token before in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from edgeh2o import _core
from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.model_config import DecoderConfig
from edgeh2o.runners.core_config import core_config
from edgeh2o.runners.native import NativeModelFile
from tests.models.tiny_file import read, read_tiny, write_tiny
from tests.tiny_models import TinyModelFactory
from tools.tiny_models.tensors import Tensors


def test_layers_of_rwkv6(
    tiny_model: TinyModelFactory, read_with_key: Callable[..., DecoderConfig]
) -> None:
    config = read_tiny(tiny_model, "rwkv6")
    first = config.layers[0]
    assert {layer.mixer for layer in config.layers} == {"rwkv6"}
    assert (first.n_wkv_heads, first.wkv_head_dim, first.n_conv_taps) == (2, 16, 2)
    assert (first.wkv_decay_rank, first.wkv_shift_rank, first.wkv_gate_rank) == (32, 32, 0)
    assert [layer.output_scale for layer in config.layers] == [1.0, 0.5] * 3
    assert config.has_embedding_norm and config.centres_norms and not config.is_gated
    assert config.is_recurrent and config.n_heads == 0
    plain = read_tiny(tiny_model, "rwkv6", rescale_every=0)
    assert {layer.output_scale for layer in plain.layers} == {1.0}
    read_with_key("rwkv6", lambda w: w.add_token_shift_count(2))


def test_files_with_shares_one_by_one(tmp_path: Path) -> None:
    """As older converters wrote them: the same model."""

    def part(tensors: Tensors) -> None:
        for layer in range(2):
            mix = f"blk.{layer}.time_mix_lerp_"
            shares = tensors.pop(f"{mix}fused.weight")
            tensors |= {f"{mix}{name}.weight": shares[i] for i, name in enumerate("wkvrg")}

    logits = []
    for edit in (None, part):
        path = write_tiny(tmp_path, "rwkv6", edit=edit, n_layers=2, ffn_dim=32, tied=False)
        with NativeModelFile(path) as model_file:
            core = model_file.load()._core_model
        session = _core.Sequence(
            core, _core.dense_policy(), max_context=32, batch_size=32, chunk_size=16
        )
        logits.append(session.prefill(np.arange(3, 25, dtype=np.int32), is_last=True))
    np.testing.assert_array_equal(*logits)

    def drop(tensors: Tensors) -> None:
        part(tensors)
        del tensors["blk.1.time_mix_lerp_v.weight"]

    path = write_tiny(tmp_path, "rwkv6", edit=drop, n_layers=2, ffn_dim=32)
    with (
        pytest.raises(FormatError, match=r"blk.1.time_mix_lerp_fused.2.weight"),
        NativeModelFile(path) as model_file,
    ):
        model_file.load()


def test_keys_that_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_with_key: Callable[..., DecoderConfig],
) -> None:
    with pytest.raises(FormatError, match=r"'rwkv6.embedding_length' is 32, .* multiple .* 24"):
        read(write_tiny(tmp_path, "rwkv6", wkv_head_dim=24))
    with pytest.raises(FormatError, match=r"'rwkv6.rescale_every_n_layers' is 5000"):
        read(write_tiny(tmp_path, "rwkv6", rescale_every=5000))
    for key, name in (
        ("rwkv6.time_mix_extra_dim", "add_time_mix_extra_dim"),
        ("rwkv6.time_decay_extra_dim", "add_time_decay_extra_dim"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(GGUFWriter, name, lambda w, _, key=key: w.add_uint32(key, 0))
            with pytest.raises(FormatError, match=rf"'{key}' is 0"):
                read(write_tiny(tmp_path, "rwkv6"))
    with pytest.raises(FormatError, match=r"'rwkv6.token_shift_count' is 1, but only 2"):
        read_with_key("rwkv6", lambda writer: writer.add_token_shift_count(1))


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config = read_tiny(tiny_model, "rwkv6")
    for changes, problem in (
        ({"wkv_head_dim": 8, "n_wkv_heads": 4}, "an RWKV layer has 4 heads of 8 numbers"),
        ({"wkv_head_dim": 32}, "RWKV has heads as wide as the model"),
        ({"wkv_decay_rank": 0}, "the vectors of an RWKV-6 layer have 32 and 0 numbers"),
        ({"wkv_gate_rank": 4}, "the vectors of an RWKV-6 layer"),
        ({"wkv_shift_rank": 0}, "RWKV has heads, and may have a network that looks back"),
    ):
        layers = (replace(config.layers[0], **changes), *config.layers[1:])
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, layers=layers))


def test_a_quantised_file(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    sizes = {"model_dim": 256, "ffn_dim": 256, "n_layers": 2, "wkv_head_dim": 64, "tied": False}
    model = tiny_model(architecture="rwkv6", **sizes)
    assert main(["quantize", str(model), str(tmp_path / "out.gguf"), "q4_k_m"]) == 0
    _, bindings = read(tmp_path / "out.gguf")
    types = {binding.name: binding.info.type_name for binding in bindings}
    assert types["blk.1.ffn_up.weight"] == types["blk.1.time_mix_gate.weight"] == "Q4_K"
    # As llama-quantize leaves them.
    names = ("w1", "w2.4", "decay_w1", "decay_w2", "first", "lerp_fused.0")
    assert {types[f"blk.1.time_mix_{name}.weight"] for name in names} == {"F32"}
    assert main(["run", str(tmp_path / "out.gguf"), "-p", "the thing", "-n", "3"]) == 0

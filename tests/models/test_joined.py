"""Files of any architecture that have joined Q, K and V, or gate and up of experts."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.models import TensorBinding, read_model
from edgeh2o.models.drafting import read_drafting_layer
from edgeh2o.models.spec import find_architecture
from tests.models.tiny_file import read, write_tiny
from tests.tiny_architectures import FAMILIES
from tools.tiny_models.tensors import Tensors

# What has attention with a matrix each of Q, K and V, in all layers or some.
ATTENDING = [
    name
    for name, family in FAMILIES.items()
    if family.attends
    and not (family.is_latent or family.fused_qkv)
    and not find_architecture(name).fused_tensors
]
MIXTURES = [
    name
    for name, family in FAMILIES.items()
    if family.has_experts and not (family.has_fused_experts or family.mamba2 == "single")
]


def join_qkv(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".attn_q." in name]:
        parts = [name.replace(".attn_q.", f".attn_{letter}.") for letter in "qkv"]
        if all(part in tensors for part in parts):
            joined = [tensors.pop(part) for part in parts]
            tensors[name.replace(".attn_q.", ".attn_qkv.")] = np.concatenate(joined)


def join_experts(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith(".ffn_gate_exps.weight")]:
        halves = [tensors.pop(part) for part in (name, name.replace("gate", "up"))]
        tensors[name.replace("gate", "gate_up")] = np.concatenate(halves, axis=1)


def contents(path: Path) -> dict[str, tuple[bytes, list[int] | None]]:
    """What the core gets of a file, by its names."""

    def of(binding: TensorBinding) -> tuple[bytes, list[int] | None]:
        data = file.tensor_bytes(binding.info)
        data = data[binding.first_byte : binding.first_byte + binding.n_bytes]
        order = None if binding.row_order is None else list(binding.row_order)
        return bytes(data), order

    with open_gguf(path) as file:
        return {binding.name: of(binding) for binding in read_model(file)[1]}


@pytest.mark.parametrize("architecture", ATTENDING)
def test_joined_queries_keys_and_values(tmp_path: Path, architecture: str) -> None:
    options = {"biases": architecture in ("llama", "starcoder2"), "tensor_type": "F16"}
    expected = contents(write_tiny(tmp_path, architecture, **options))
    joined = write_tiny(tmp_path, architecture, edit=join_qkv, **options)
    with open_gguf(joined) as file:
        assert any(".attn_qkv." in name for name in file.tensors)
    assert contents(joined) == expected


@pytest.mark.parametrize("architecture", MIXTURES)
def test_joined_experts(tmp_path: Path, architecture: str) -> None:
    expected = contents(write_tiny(tmp_path, architecture))
    joined = write_tiny(tmp_path, architecture, edit=join_experts)
    with open_gguf(joined) as file:
        assert any(".ffn_gate_up_exps." in name for name in file.tensors)
    assert contents(joined) == expected


def test_the_layer_that_drafts_may_be_joined(tmp_path: Path) -> None:
    def names(edit: Callable[[Tensors], None] | None) -> set[tuple[str, int, int]]:
        path = write_tiny(tmp_path, "qwen35moe", edit=edit, n_drafting_layers=1)
        with open_gguf(path) as file:
            _, bindings = read_drafting_layer(file, read_model(file)[0])
        return {(each.name, each.n_rows, each.info.cols) for each in bindings}

    def join(tensors: Tensors) -> None:
        join_qkv(tensors)
        join_experts(tensors)

    assert names(join) == names(None)


@pytest.mark.parametrize("pattern", ["blk.0.*", "*.weight"])  # some layers; not the biases
def test_some_may_be_joined(tmp_path: Path, pattern: str) -> None:
    def join_some(tensors: Tensors) -> None:
        some = {name: tensors.pop(name) for name in fnmatch.filter(list(tensors), pattern)}
        join_qkv(some)
        tensors.update(some)

    expected = contents(write_tiny(tmp_path, "qwen2"))
    assert contents(write_tiny(tmp_path, "qwen2", edit=join_some)) == expected


@pytest.mark.parametrize("name", ["attn_qkv.weight", "attn_qkv.bias"])
def test_joined_matrices_of_another_height(tmp_path: Path, name: str) -> None:
    def cut(tensors: Tensors) -> None:
        join_qkv(tensors)
        tensors[f"blk.1.{name}"] = tensors[f"blk.1.{name}"][:-1]

    with pytest.raises(FormatError, match=rf"'blk.1.{name}' has shape .*make 32 \+ 16 \+ 16 of it"):
        read(write_tiny(tmp_path, "qwen2", edit=cut))


def test_joined_and_single_ones(tmp_path: Path) -> None:
    def double(tensors: Tensors) -> None:
        single = dict(tensors)
        join_qkv(tensors)
        tensors.update(single)

    with pytest.raises(FormatError, match="both"):
        read(write_tiny(tmp_path, "llama", edit=double))


def test_what_is_joined_is_quantised(tmp_path: Path) -> None:
    def join(tensors: Tensors) -> None:
        join_qkv(tensors)
        join_experts(tensors)

    path = write_tiny(tmp_path, "qwen3moe", edit=join, model_dim=64, head_dim=32, ffn_dim=64)
    assert main(["quantize", str(path), str(tmp_path / "out.gguf"), "q8_0"]) == 0
    with open_gguf(tmp_path / "out.gguf") as file:
        types = {name: info.type_name for name, info in file.tensors.items() if "blk.0" in name}
    for name in ("attn_qkv", "ffn_gate_up_exps"):
        assert types[f"blk.0.{name}.weight"] == "Q8_0"
    read(tmp_path / "out.gguf")

"""Operands and masks that are checked before a model runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeh2o import LLM
from edgeh2o.errors import EdgeH2OError
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import (
    SMALL,
    change_model,
    copy_folder,
    find_node,
    set_attribute,
    set_entry,
)
from tests.onnx.variants import BiasedMultiHead, MaskedAttention


def cut_blocks(model: onnx.ModelProto) -> None:
    node = find_node(model, "MatMulNBits")
    tensor = next(t for t in model.graph.initializer if t.name == node.input[1])
    rows, blocks, n_bytes = tensor.dims
    del tensor.dims[:]
    tensor.dims.extend([rows, blocks // 2, 2 * n_bytes])


def change_operand(i: int, dims: list[int]) -> Any:
    def change(model: onnx.ModelProto) -> None:
        name = find_node(model, "MatMulNBits").input[i]
        tensor = next(t for t in model.graph.initializer if t.name == name)
        size = {1: 1, 2: 4}[i] * int(np.prod(dims))
        del tensor.dims[:]
        tensor.dims.extend(dims)
        if tensor.data_location == tensor.EXTERNAL:
            set_entry(tensor, "length", str(size))
        else:
            tensor.raw_data = tensor.raw_data[:size]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_blocks, r"weights of node .* have shape \[64, 1, 32\]"),
        (change_operand(1, [64, 1, 16]), "weights .* need 2048 numbers"),
        (change_operand(2, [64, 1]), "scales .* need 128 numbers"),
        (lambda m: set_attribute(find_node(m, "MatMulNBits"), "N", 2**40), "N = .* cannot be"),
        (lambda m: find_node(m, "MatMulNBits").ClearField("input"), "onnxruntime refuses"),
        (lambda m: set_attribute(find_node(m, "MatMulNBits"), "bits", 5), "5 bits"),
        (lambda m: set_attribute(find_node(m, "MatMulNBits"), "block_size", 24), "blocks of 24"),
    ],
)
def test_wrong_blocks_are_refused(
    change: Any, message: str, onnx_model: OnnxModelFactory, tmp_path: Path
) -> None:
    """onnxruntime 1.23 takes a matrix of another shape than K and N say without a word."""
    source = onnx_model(**SMALL, tensor_type="Q4_0")
    folder = copy_folder(source, tmp_path / "model", change_model(change))
    with pytest.raises(EdgeH2OError, match=message):
        LLM(folder)


def look_ahead(model: onnx.ModelProto) -> None:
    find_node(model, "Greater").op_type = "Less"  # sees what is to come, and not what was


@pytest.mark.parametrize("variant", [BiasedMultiHead, MaskedAttention])
def test_a_mask_that_is_not_causal_is_refused(
    variant: Any, onnx_model: OnnxModelFactory, tmp_path: Path
) -> None:
    source = onnx_model(variant, **{**SMALL, "n_kv_heads": 4})
    folder = copy_folder(source, tmp_path / "model", change_model(look_ahead))
    with pytest.raises(EdgeH2OError, match="not what a causal decoder has"):
        LLM(folder)


def shift_length(model: onnx.ModelProto) -> None:
    find_node(model, "Sub").op_type = "Add"


def test_a_length_that_is_off_is_refused(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "model", change_model(shift_length))
    with pytest.raises(EdgeH2OError, match=r"\(last position\)"):
        LLM(folder)

"""The matrix products of an ONNX model that the kernels compute instead of onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgeh2o.errors import FormatError
from edgeh2o.export.onnx import MODEL_NAME
from edgeh2o.onnx import runner as onnx_runner
from edgeh2o.onnx.blocks import unpack_blocks
from edgeh2o.onnx.cut import cut_decoder
from edgeh2o.onnx.graph import OnnxGraph
from edgeh2o.onnx.model import OnnxModelFile
from edgeh2o.onnx.products import pack_products
from edgeh2o.onnx.sites import find_attention
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import SMALL, copy_folder, edited, set_attribute
from tests.onnx.reading import Uncut, make_tokens, open_llm, read_all

HALF_ROUNDING = 2.0**-11


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1).astype(np.int64)


@st.composite
def _matrices(draw: st.DrawFn) -> dict[str, Any]:
    """Operands of a MatMulNBits as the operator's specification lays them out."""
    bits, block_size = draw(st.sampled_from([4, 8])), draw(st.sampled_from([32, 64, 128]))
    n_outputs, n_inputs = draw(st.integers(1, 5)), 32 * draw(st.integers(1, 9))
    n_blocks = -(-n_inputs // block_size)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scales = rng.standard_normal((n_outputs, n_blocks)).astype(np.float32) * 0.1
    scales[np.abs(scales) < 2**-14] = 0
    zero_points = None
    if draw(st.booleans()):
        n_bytes = -(-n_blocks * bits // 8)
        zero_points = rng.integers(0, 256, (n_outputs, n_bytes)).astype(np.uint8)
        if bits == 8:
            zero_points[:] = 128
    quants = rng.integers(0, 256, (n_outputs, n_blocks * block_size * bits // 8)).astype(np.uint8)
    return {
        "quants": quants,
        "scales": scales,
        "zero_points": zero_points,
        "bits": bits,
        "n_inputs": n_inputs,
        "block_size": block_size,
    }


@given(_matrices())
@settings(max_examples=60, deadline=None)
def test_blocks_keep_the_values(operands: dict[str, Any]) -> None:
    """(q - zero point) * scale, with the scale and its product rounded to half precision."""
    bits, n_inputs, block_size = (operands[k] for k in ("bits", "n_inputs", "block_size"))
    quants, zeros = operands["quants"], operands["zero_points"]
    n_blocks = operands["scales"].shape[1]
    values = _nibbles(quants) if bits == 4 else quants.astype(np.int64)
    if zeros is None:
        zero = np.full((len(quants), n_blocks), 1 << (bits - 1))
    else:
        zero = (_nibbles(zeros) if bits == 4 else zeros.astype(np.int64))[:, :n_blocks]
    spread = [np.repeat(a, block_size, 1)[:, :n_inputs] for a in (zero, operands["scales"])]
    expected = (values[:, :n_inputs] - spread[0]) * spread[1].astype(np.float64)
    found = unpack_blocks(**operands)
    assert found is not None
    name, data = found
    weights = dequantize(data, GGMLQuantizationType[name])
    bound = HALF_ROUNDING * np.abs(spread[1]) * (values[:, :n_inputs] + np.abs(spread[0]) + 1)
    assert (np.abs(weights - expected) <= bound).all()


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 2},
        {"block_size": 16},
        {"n_inputs": 48},
        {"scales": np.full((1, 2), np.nan, np.float32)},
        {"scales": np.full((1, 2), 1e5, np.float32)},
        {"scales": np.full((1, 2), 1e-6, np.float32)},
        {"bits": 8, "zero_points": np.full((1, 2), 100, np.uint8)},
    ],
)
def test_what_has_no_such_blocks(change: dict[str, Any]) -> None:
    operands: dict[str, Any] = {
        "quants": np.zeros((1, 64), np.uint8),
        "scales": np.ones((1, 2), np.float32),
        "zero_points": None,
        "bits": 4,
        "n_inputs": 64,
        "block_size": 32,
    }
    assert unpack_blocks(**operands) is not None
    assert unpack_blocks(**{**operands, **change}) is None


def _quantised_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "MatMulNBits"]


def _add_operand(model: onnx.ModelProto, node: onnx.NodeProto, place: int, values: Any) -> None:
    name = f"{node.name}/{place}"
    model.graph.initializer.append(numpy_helper.from_array(values, name))
    while len(node.input) <= place:
        node.input.append("")
    node.input[place] = name


def _set_level(level: int) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        for node in _quantised_nodes(model):
            set_attribute(node, "accuracy_level", level)

    return edit


def _add_biases(model: onnx.ModelProto) -> None:
    rng = np.random.default_rng(0)
    for node in _quantised_nodes(model):
        n_outputs = next(a.i for a in node.attribute if a.name == "N")
        values = rng.standard_normal(n_outputs).astype(np.float32) * 0.1
        _add_operand(model, node, 5, values)


def _add_zero_points(model: onnx.ModelProto) -> None:
    rng = np.random.default_rng(0)
    for node in _quantised_nodes(model):
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if values["bits"] == 4:
            n_bytes = -(-(values["K"] // 32) // 2)
            zeros = rng.choice([7, 8, 9], (values["N"], n_bytes, 2)).astype(np.uint8)
            _add_operand(model, node, 3, (zeros[..., 0] | zeros[..., 1] << 4).reshape(-1))


def _rename_logits(model: onnx.ModelProto) -> None:
    """The last product gives the logits itself, as in the files of onnxruntime-genai's builder."""
    last = model.graph.node[-1]
    assert (last.op_type, list(last.output)) == ("Identity", ["logits"])
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name == last.input[0]:
                node.output[i] = "logits"
    model.graph.node.remove(last)


@pytest.mark.parametrize(
    ("edit", "bound"),
    [
        (_set_level(4), 0.1),
        (_add_biases, 0.1),
        (_add_zero_points, 0.25),  # scale times zero point is rounded to half precision
        (_rename_logits, 0.1),
    ],
    ids=["as exported", "biases", "zero points", "logits"],
)
def test_every_operand(
    onnx_model: OnnxModelFactory,
    tmp_path: Path,
    edit: Callable[[onnx.ModelProto], None],
    bound: float,
) -> None:
    """With what MatMulNBits can have besides weights, logits are onnxruntime's."""
    folder = copy_folder(onnx_model(tensor_type="Q4_0", tied=False, **SMALL), tmp_path / "model")
    with edited(folder) as model:
        edit(model)
        n_nodes = len(_quantised_nodes(model))
    graph = OnnxGraph(folder / MODEL_NAME)
    assert len(pack_products(graph, lambda _: None)) == n_nodes > 0
    tokens = make_tokens(80)
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, 70)
    expected = Uncut(folder / MODEL_NAME).read(tokens)
    assert np.abs(found - expected).max() < bound * expected.std()
    assert np.abs(found - expected).mean() < bound / 5 * expected.std()


@pytest.mark.parametrize("level", [0, 1])
def test_activations_are_rounded_only_where_the_file_allows_it(
    onnx_model: OnnxModelFactory, tmp_path: Path, level: int
) -> None:
    folder = copy_folder(onnx_model(tensor_type="Q4_0", **SMALL), tmp_path / "model")
    with edited(folder) as model:
        _set_level(level)(model)
    assert not pack_products(OnnxGraph(folder / MODEL_NAME), lambda _: None)
    tokens = make_tokens(50)
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, 45)
    np.testing.assert_allclose(found, Uncut(folder / MODEL_NAME).read(tokens), atol=1e-4)


def _add_group_indices(model: onnx.ModelProto) -> None:
    """Inputs in another order than their blocks, as GPTQ with desc_act has them."""
    rng = np.random.default_rng(0)
    for node in _quantised_nodes(model):
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        groups = np.arange(values["K"], dtype=np.int32) // values["block_size"]
        _add_operand(model, node, 4, rng.permutation(groups))


def test_group_indices_are_left_to_onnxruntime(
    onnx_model: OnnxModelFactory, tmp_path: Path
) -> None:
    folder = copy_folder(onnx_model(tensor_type="Q4_0", **SMALL), tmp_path / "model")
    with edited(folder) as model:
        _add_group_indices(model)
    assert not pack_products(OnnxGraph(folder / MODEL_NAME), lambda _: None)
    tokens = make_tokens(50)
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, 45)
    np.testing.assert_allclose(found, Uncut(folder / MODEL_NAME).read(tokens), atol=1e-4)


def test_group_indices_of_8_bits_are_refused(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    folder = copy_folder(onnx_model(tensor_type="Q8_0", **SMALL), tmp_path / "model")
    with edited(folder) as model:
        _add_group_indices(model)
    with pytest.raises(FormatError, match=r"MatMulNBits\) has group indices \(g_idx\)"):
        OnnxModelFile(folder)


def test_products_of_one_input_share_its_rounding(onnx_model: OnnxModelFactory) -> None:
    folder = onnx_model(tensor_type="Q4_0", **SMALL)
    graph = OnnxGraph(folder / MODEL_NAME)
    cut = cut_decoder(graph, find_attention(graph), pack_products(graph, lambda _: None))
    per_stage = [len(stage.products) for stage in cut.stages]
    # q, k, v | attention | output | gate, up | down, twice; then the logits.
    assert [n for n in per_stage if n] == [3, 1, 2, 1, 3, 1, 2, 1, 1]
    with open_llm(folder) as llm:
        groups = [len(stage.products) for stage in llm.model.decoder.stages]  # type: ignore[attr-defined]
    assert max(groups) == 1


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0"])
def test_blocks_of_tokens(
    onnx_model: OnnxModelFactory, monkeypatch: pytest.MonkeyPatch, tensor_type: str
) -> None:
    """Values that live in one block of tokens share memory; results are those of one block."""
    folder = onnx_model(tensor_type=tensor_type)
    tokens = make_tokens(70)
    rows = []
    for n_tokens in (256, 16, 5):
        monkeypatch.setattr(onnx_runner, "BLOCK_TOKENS", n_tokens)
        with open_llm(folder) as llm:
            rows.append(read_all(llm, tokens, 60))
    for other in rows[1:]:
        assert np.abs(other - rows[0]).max() < (1e-4 if tensor_type == "F32" else 0.5)
        np.testing.assert_allclose(other[0], rows[0][0], atol=1e-4)


def test_any_number_of_threads_gives_the_same_logits(onnx_model: OnnxModelFactory) -> None:
    folder = onnx_model(tensor_type="Q4_0")
    tokens = make_tokens(60)
    rows = []
    for threads in (1, 2, 3):
        with open_llm(folder, threads=threads) as llm:
            rows.append(read_all(llm, tokens, 50))
    for other in rows[1:]:
        np.testing.assert_array_equal(other, rows[0])


def test_logits_must_follow_the_attention(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    """A graph whose logits are those of the embedding alone is no decoder."""
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "model")
    with edited(folder) as model:
        embedding: Sequence[str] = next(
            node.output for node in model.graph.node if node.op_type == "Gather"
        )
        last = model.graph.node[-1]
        last.input[0] = embedding[0]
    with pytest.raises(FormatError, match="logits do not follow"):
        open_llm(folder)

"""Number formats of ONNX models: blocks of a few bits, dynamic int8, half precision."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeh2o.errors import FormatError
from edgeh2o.export.onnx import DATA_NAME, MODEL_NAME
from edgeh2o.onnx import segment_sessions
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import copy_folder, mix_tokens
from tests.onnx.reading import RUNTIME, Uncut, make_tokens, open_llm, read_all
from tests.tiny_models import TinyModelFactory


@pytest.mark.parametrize("tensor_type", ["Q4_0", "Q8_0"])
def test_matmul_n_bits(onnx_model: OnnxModelFactory, tensor_type: str) -> None:
    """Rounding of activations to 8 bits turns differences of 1e-6 into steps, now and then."""
    folder = onnx_model(tensor_type=tensor_type)
    model = onnx.load(folder / MODEL_NAME, load_external_data=False)
    assert {n.op_type for n in model.graph.node} >= {"MatMulNBits"}
    assert not any(n.op_type in ("MatMul", "FusedMatMul") for n in model.graph.node)
    tokens = make_tokens(100)
    with open_llm(folder) as llm:
        found = read_all(llm, tokens, 90)
    expected = Uncut(folder / MODEL_NAME).read(tokens)
    assert np.abs(found - expected).max() < 0.1 * expected.std()
    assert np.abs(found - expected).mean() < 0.02 * expected.std()
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4)


def test_blocks_are_exact(tiny_model: TinyModelFactory) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    from edgeh2o.formats.split import open_model_file
    from edgeh2o.onnx.blocks import pack_blocks

    for name in ("Q4_0", "Q8_0"):
        with open_model_file(tiny_model(tensor_type=name)) as gguf:
            info = gguf.tensors["blk.0.ffn_up.weight"]
            data = gguf.tensor_bytes(info)
        packed = pack_blocks(data, name, info.rows)
        assert packed is not None
        quants = packed.quants.astype(np.float32)
        if packed.bits == 4:
            quants = np.stack([packed.quants & 15, packed.quants >> 4], -1).astype(np.float32)
            quants = quants.reshape(*packed.quants.shape[:2], -1)
        values = (quants - 2 ** (packed.bits - 1)) * packed.scales[..., None]
        raw = np.frombuffer(data, np.uint8).reshape(info.rows, -1)
        expected = dequantize(raw, GGMLQuantizationType[name])
        np.testing.assert_array_equal(values.reshape(info.rows, -1), expected)


def quantize_dynamically(plain: onnx.ModelProto, folder: Path) -> Path:
    """Writes a model with int8 weights, as optimum does, and returns its path."""
    if RUNTIME < (1, 24):
        pytest.importorskip("sympy", reason="this onnxruntime quantises with its help")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    onnx.save(plain, folder.parent / "plain.onnx")
    (folder / "onnx").mkdir()
    target = folder / "onnx" / "model_quantized.onnx"
    quantize_dynamic(
        folder.parent / "plain.onnx",
        target,
        weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
    )
    return target


@pytest.fixture
def plain_model(onnx_model: OnnxModelFactory, tmp_path: Path) -> tuple[onnx.ModelProto, Path]:
    """A model with the weights inside, and a folder with the tokenizer."""
    source, folder = onnx_model(), tmp_path / "model"
    folder.mkdir()
    shutil.copy(source / "tokenizer.json", folder)
    return onnx.load(source / MODEL_NAME), folder


def test_dynamic_int8(plain_model: tuple[onnx.ModelProto, Path]) -> None:
    """The export of optimum: activations quantised per call, by one scale for all rows.

    Blocks of rows are other calls, so the bound is that of the rounding: a tenth of a deviation.
    """
    target = quantize_dynamically(*plain_model)
    operators = {n.op_type for n in onnx.load(target).graph.node}
    assert "DynamicQuantizeLinear" in operators and "MatMulInteger" in operators
    tokens = make_tokens(40)
    with open_llm(target.parent.parent) as llm:
        found = read_all(llm, tokens, 40)
    expected = Uncut(target).read(tokens)
    assert np.abs(found - expected).max() < 0.3 * expected.std()
    assert np.abs(found - expected).mean() < 0.05 * expected.std()


def test_tokens_mixed_in_int8_are_refused(plain_model: tuple[onnx.ModelProto, Path]) -> None:
    """The scale that rows share is allowed for, what one token takes from another is not."""
    plain, folder = plain_model
    mix_tokens(plain)
    target = quantize_dynamically(plain, folder)
    with pytest.raises(FormatError, match="depends on other tokens"):
        open_llm(target)


def test_int8_sums_are_exact() -> None:
    """Signed weights too, on machines whose fast products of 8-bit numbers saturate."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (3, 64), np.uint8)
    weight = rng.integers(-128, 128, (64, 32), np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "weight"], ["y"])],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["n", 32])],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(),
        segment_sessions.session_options(n_threads=1),
        providers=["CPUExecutionProvider"],
    )
    (found,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(found, x.astype(np.int32) @ weight)


def to_half(model: onnx.ModelProto) -> None:
    """The whole model in float16, logits too."""
    half = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for info in (*model.graph.input, *model.graph.output):
        if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            info.type.tensor_type.elem_type = half


def test_half_precision(onnx_model: OnnxModelFactory, tmp_path: Path) -> None:
    folder = copy_folder(onnx_model(), tmp_path / "model")
    model = onnx.load(folder / MODEL_NAME)
    to_half(model)
    (folder / DATA_NAME).unlink()
    onnx.save(model, folder / MODEL_NAME)
    tokens = make_tokens(60)
    with open_llm(folder) as llm, open_llm(onnx_model()) as full:
        found, exact = read_all(llm, tokens, 50), read_all(full, tokens, 50)
    expected = Uncut(folder / MODEL_NAME).read(tokens)
    error = np.abs(expected - exact).max()  # what half precision costs onnxruntime itself
    assert np.abs(found - expected).max() < 2 * error
    assert found.dtype == np.float32

"""The reader of ONNX messages against the package ``onnx``, and bytes that are no messages."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from edgeh2o.errors import FormatError
from edgeh2o.export.onnx import MODEL_NAME
from edgeh2o.onnx.data import number_bytes
from edgeh2o.onnx.encoding import encode_model, encode_node, encode_tensor, make_node
from edgeh2o.onnx.graph import OnnxGraph, attributes
from edgeh2o.onnx.messages import ValueInfo, read_attribute, read_model, read_node, read_tensor
from edgeh2o.onnx.wire import read_fields
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import SMALL, copy_folder, edited
from tests.onnx.exported import ROOT, unpack

int64s = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(width=32, allow_nan=False)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
values = (
    int64s
    | floats
    | names
    | st.lists(int64s, min_size=1, max_size=3)
    | st.lists(floats, min_size=1, max_size=3)
    | st.lists(names, min_size=1, max_size=3)
)
nodes = st.builds(
    lambda op_type, inputs, outputs, name, domain, settings: helper.make_node(
        op_type, inputs, outputs, name=name, domain=domain, **settings
    ),
    names,
    st.lists(names, max_size=4),
    st.lists(names, max_size=3),
    names,
    names,
    st.dictionaries(st.sampled_from(["axis", "perm", "epsilon", "mode"]), values, max_size=4),
)


def read(node: onnx.NodeProto) -> Any:
    return read_node(memoryview(node.SerializeToString()), {})


@given(nodes)
def test_nodes_are_read_and_written_as_by_onnx(node: onnx.NodeProto) -> None:
    found = read(node)
    assert (found.op_type, found.name, found.domain) == (node.op_type, node.name, node.domain)
    assert (list(found.input), list(found.output)) == (list(node.input), list(node.output))
    expected = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    plain = {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in expected.items()
    }
    lists = {name: list(v) if isinstance(v, tuple) else v for name, v in attributes(found).items()}
    assert lists == plain
    written = onnx.NodeProto.FromString(encode_node(found))
    for field in ("name", "op_type", "domain"):  # present, if empty
        setattr(node, field, getattr(node, field))
    assert written == node


KINDS = ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "?")


@given(
    kind=st.sampled_from(KINDS),
    shape=st.lists(st.integers(0, 3), max_size=3),
    seed=st.integers(0, 99),
    is_raw=st.booleans(),
)
def test_tensors_have_the_bytes_that_onnx_reads(
    kind: str, shape: list[int], seed: int, is_raw: bool
) -> None:
    rng = np.random.default_rng(seed)
    array = rng.integers(0, 2 if kind == "?" else 100, shape).astype(kind)
    if kind[0] in "if" and array.size:
        array = -array
    if is_raw:
        proto = numpy_helper.from_array(array, "t")
    else:
        elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        proto = helper.make_tensor("t", elem_type, shape, array.reshape(-1).tolist())
    tensor = read_tensor(memoryview(proto.SerializeToString()))
    assert tensor.name == "t" and tensor.dims == tuple(shape)
    assert number_bytes(tensor) == numpy_helper.to_array(proto).tobytes()
    written = onnx.TensorProto.FromString(encode_tensor(tensor))
    np.testing.assert_array_equal(numpy_helper.to_array(written), array)


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("*.zip")))
def test_exported_files_are_read_as_by_onnx(name: str, tmp_path: Path) -> None:
    """Every node, constant, input and output."""
    folder, _ = unpack(name, tmp_path / name)
    for path in folder.glob("*.onnx"):
        proto = onnx.load(path, load_external_data=False)
        model = read_model(memoryview(path.read_bytes()))
        assert model.ir_version == proto.ir_version
        assert list(model.opsets) == [(item.domain, item.version) for item in proto.opset_import]
        assert dict(model.properties) == {p.key: p.value for p in proto.metadata_props}
        graph = proto.graph
        for node, expected in zip(model.graph.node, graph.node, strict=True):
            assert node.source == expected.SerializeToString(deterministic=True)
            assert attributes(node).keys() == {each.name for each in expected.attribute}
            names = (list(node.input), list(node.output))
            assert names == (list(expected.input), list(expected.output))
        for tensor, original in zip(model.graph.initializer, graph.initializer, strict=True):
            assert (tensor.name, tensor.elem_type) == (original.name, original.data_type)
            assert tensor.dims == tuple(original.dims)
            entries = tuple((entry.key, entry.value) for entry in original.external_data)
            assert (tensor.external or ()) == entries
        for infos, originals in (
            (model.graph.input, graph.input),
            (model.graph.output, graph.output),
        ):
            for info, other in zip(infos, originals, strict=True):
                kind = other.type.tensor_type
                dims = tuple(dim.dim_value for dim in kind.shape.dim)
                assert info == ValueInfo(other.name, kind.elem_type, dims)


def test_a_written_model_is_one_of_onnx() -> None:
    data = encode_model(
        "sums",
        [make_node("Transpose", ["x"], ["y"], perm=[1, 0])],
        inputs=[ValueInfo("x", 1, (2, 0))],
        outputs=["y"],
        initializers=[],
        opsets={"": 21},
        ir_version=9,
    )
    model = onnx.ModelProto.FromString(data)
    assert model.graph.name == "sums" and model.opset_import[0].version == 21
    assert helper.get_attribute_value(model.graph.node[0].attribute[0]) == [1, 0]
    assert [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim] == [2, 0]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x0a", "cut off"),
        (b"\x0a\x05abc", "5 bytes has 3 left"),
        (b"\x08\xff", "cut off"),
        (b"\x08" + b"\xff" * 11, "more than ten bytes"),
        (b"\x00\x01", "number 0"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\x0d\x01\x02", "4 bytes has 2 left"),
        (b"\x09\x01\x02", "8 bytes has 2 left"),
    ],
)
def test_malformed_bytes_are_named(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        list(read_fields(memoryview(data)))


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for reader in (read_model, read_tensor, read_attribute):
        with suppress(FormatError):
            reader(memoryview(data))


def test_what_protobuf_would_merge_is_refused() -> None:
    model = helper.make_model(helper.make_graph([], "g", [], []))
    data = model.SerializeToString()
    with pytest.raises(FormatError, match="2 graphs"):
        read_model(memoryview(data + data))


def test_attributes_of_functions_are_refused() -> None:
    attribute = onnx.AttributeProto(name="a", ref_attr_name="b", type=onnx.AttributeProto.INT)
    with pytest.raises(FormatError, match="function"):
        read_attribute(memoryview(attribute.SerializeToString()))


def test_a_constant_outside_of_the_graph_is_refused(
    onnx_model: OnnxModelFactory, tmp_path: Path
) -> None:
    """The package would read a file of the working directory."""

    folder = copy_folder(onnx_model(**SMALL), tmp_path / "copy")
    tensor = onnx.TensorProto(name="t", data_type=1, dims=[2], data_location=1)
    for key, value in (("location", "secret"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    with edited(folder) as model:
        model.graph.node.append(helper.make_node("Constant", [], ["outside"], value=tensor))
    graph = OnnxGraph(folder / MODEL_NAME)
    with pytest.raises(FormatError, match="outside of the graph"):
        graph.constant("outside")


def test_attributes_of_other_types_are_refused(
    onnx_model: OnnxModelFactory, tmp_path: Path
) -> None:
    folder = copy_folder(onnx_model(**SMALL), tmp_path / "copy")
    kind = onnx.AttributeProto.TYPE_PROTO
    with edited(folder) as model:
        model.graph.node[0].attribute.add(name="kind", type=kind, tp=onnx.TypeProto())
    with pytest.raises(FormatError, match="'kind' of type 13"):
        OnnxGraph(folder / MODEL_NAME)

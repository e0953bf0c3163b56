"""What a load does once: sessions that layers share, constants that stay where they are."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeh2o.errors import FormatError, ResourceError, UsageError
from edgeh2o.export.onnx import DATA_NAME
from edgeh2o.host import memory
from edgeh2o.onnx import data, segment_sessions
from edgeh2o.onnx import graph as onnx_graph
from edgeh2o.onnx.data import ExternalFiles, OnnxTensor
from edgeh2o.onnx.encoding import make_node
from edgeh2o.onnx.messages import read_node
from edgeh2o.onnx.model import OnnxModelFile
from edgeh2o.onnx.packages import explain_import
from edgeh2o.onnx.segment_sessions import FLOAT, FLOAT16, MIN_SHARED_BYTES, SessionMaker
from edgeh2o.tokenizer import tokenizer_json
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import copy_folder
from tests.onnx.reading import make_tokens, open_llm, read_all


class Graph:
    """As much of a graph as sessions need: float32 norms of so many rows each."""

    def __init__(self, **arrays: np.ndarray[Any, Any]) -> None:
        self.path, self.files = Path("model.onnx"), ExternalFiles(Path())
        self.ir_version = 9
        self.opsets = {"": 21, "com.microsoft": 1}
        kinds = {np.dtype(np.float32): FLOAT, np.dtype(np.float16): FLOAT16}
        self.tensors = {
            name: OnnxTensor(name, kinds[a.dtype], a.shape, memoryview(a.tobytes()))
            for name, a in arrays.items()
        }


def make_norm(maker: SessionMaker, x: str, weight: str, out: str, **settings: float) -> Any:
    made = onnx.helper.make_node("SimplifiedLayerNormalization", [x, weight], [out], **settings)
    node = read_node(memoryview(made.SerializeToString()), {})
    return maker.make("norm", [node], {x: FLOAT}, [out], [weight])


def norm(x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    mean = (x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5
    result: np.ndarray[Any, Any] = x / np.sqrt(mean) * weight
    return result


def test_segments_that_differ_in_names_alone_share_a_session() -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(MIN_SHARED_BYTES, np.float32) for name in ("w0", "w1")}
    graph: Any = Graph(**weights)
    maker = SessionMaker(graph, 1)
    first = make_norm(maker, "x0", "w0", "y0", epsilon=1e-5)
    second = make_norm(maker, "x1", "w1", "y1", epsilon=1e-5)
    other = make_norm(maker, "x2", "w1", "y2", epsilon=1e-4)
    assert first.session is second.session
    assert other.session is not first.session
    assert list(second.inputs) == ["x1"] and list(second.outputs) == ["y1"]
    x = rng.standard_normal((1, 3, MIN_SHARED_BYTES), np.float32)
    for segment, i in ((first, 0), (second, 1)):
        found = segment.run({f"x{i}": x})[f"y{i}"]
        np.testing.assert_allclose(found, norm(x, weights[f"w{i}"]), rtol=1e-4, atol=1e-4)


def test_an_embedding_is_read_where_it_is() -> None:
    table = np.arange(2 * MIN_SHARED_BYTES, dtype=np.float32).reshape(-1, 4)
    graph: Any = Graph(table=table)
    node = make_node("Gather", ["table", "ids"], ["rows"])
    segment = SessionMaker(graph, 1).make("rows", [node], {"ids": 7}, ["rows"], ["table"])
    assert not segment.held
    (own,) = segment.constants.values()
    assert own is graph.tensors["table"]
    found = segment.run({"ids": np.array([[2, 0]])})["rows"]
    np.testing.assert_array_equal(found, table[[2, 0]][None])


@pytest.mark.parametrize("least", [0, 2**25])
def test_weights_of_products_are_packed_and_share_no_session(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones from the file."""
    monkeypatch.setattr(segment_sessions, "_PACK_FROM_FILE_BYTES", least)
    rng = np.random.default_rng(0)
    shape = (32, 64)
    graph: Any = Graph(a=rng.standard_normal(shape, np.float32), b=np.ones(shape, np.float32))
    maker = SessionMaker(graph, 1)
    segments = [
        maker.make(
            "product",
            [make_node("MatMul", [f"x{name}", name], [f"y{name}"])],
            {f"x{name}": FLOAT},
            [f"y{name}"],
            [name],
        )
        for name in "ab"
    ]
    assert segments[0].session is not segments[1].session
    assert all(segment.held and not segment.constants for segment in segments)
    x = rng.standard_normal((1, 3, 32), np.float32)
    for segment, name in zip(segments, "ab", strict=True):
        found = segment.run({f"x{name}": x})[f"y{name}"]
        expected = x @ graph.tensors[name].array()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_sessions_do_not_grow_with_layers(
    onnx_model: OnnxModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between products of our own all layers compute the same."""
    counts = {}
    start = SessionMaker._start
    for n_layers in (2, 4):
        made: list[str] = []

        def note(self: SessionMaker, what: str, *args: Any, made: list[str] = made) -> Any:
            made.append(what)
            return start(self, what, *args)

        monkeypatch.setattr(SessionMaker, "_start", note)
        folder = onnx_model(tensor_type="Q4_0", n_layers=n_layers)
        with OnnxModelFile(folder) as file:
            file.load()
        counts[n_layers] = len(made)
    assert counts[2] == counts[4]


def test_shared_sessions_change_no_bit(
    onnx_model: OnnxModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do constants that go in with every call."""
    folder = onnx_model(tensor_type="Q4_0")
    tokens = make_tokens(40)
    with open_llm(folder) as llm:
        shared = read_all(llm, tokens, 30)
    monkeypatch.setattr(segment_sessions, "_READ_IN_PLACE", {})
    with open_llm(folder) as llm:
        np.testing.assert_array_equal(read_all(llm, tokens, 30), shared)


def test_constants_are_sampled_once(
    onnx_model: OnnxModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = onnx_graph.blake2b

    def note(**settings: int) -> Any:
        made.append(settings)
        return original(**settings)

    monkeypatch.setattr(onnx_graph, "blake2b", note)
    with OnnxModelFile(onnx_model()) as file:
        assert file.load().fingerprint == file.fingerprint
    assert len(made) == 1


def test_the_tokenizer_is_parsed_once(
    onnx_model: OnnxModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    build = tokenizer_json._build_pipeline

    def note(text: str) -> Any:
        texts.append(text)
        return build(text)

    def refuse(text: str) -> Any:
        raise AssertionError("parsed again")

    monkeypatch.setattr(tokenizer_json, "_build_pipeline", note)
    monkeypatch.setattr(tokenizer_json, "parse_document", refuse)
    with OnnxModelFile(onnx_model()) as file:
        file.load()
    assert len(texts) == 1


def test_no_architecture_of_gguf_is_imported(onnx_model: OnnxModelFactory) -> None:
    program = (
        "import sys; from pathlib import Path; from edgeh2o.onnx.model import OnnxModelFile; "
        "OnnxModelFile(Path(sys.argv[1])).load(); "
        "print([name for name in sys.modules if name.startswith('edgeh2o.models')])"
    )
    command = [sys.executable, "-c", program, str(onnx_model())]
    assert subprocess.run(command, check=True, capture_output=True).stdout.strip() == b"[]"


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0"])
def test_inspecting_copies_no_weights(
    tensor_type: str, onnx_model: OnnxModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go in where they are, and what was read of the file is given back after each trial."""
    copied, released = [], []
    release, share = OnnxTensor.release, SessionMaker._shared_value

    def note_copy(self: SessionMaker, tensor: OnnxTensor) -> Any:
        copied.append(tensor.name)
        return share(self, tensor)

    def note_release(self: OnnxTensor) -> None:
        released.append(self.name)
        release(self)

    monkeypatch.setattr(SessionMaker, "_shared_value", note_copy)
    monkeypatch.setattr(OnnxTensor, "release", note_release)
    with OnnxModelFile(onnx_model(tensor_type=tensor_type)) as file:
        file.check()
        large = {name for name, t in file._graph.tensors.items() if len(t.data) >= MIN_SHARED_BYTES}
    rotary = {name for name in large if "cos" in name or "sin" in name}
    assert not copied
    assert large - rotary <= set(released)


def test_a_weight_file_that_was_replaced_is_refused(
    onnx_model: OnnxModelFactory, tmp_path: Path
) -> None:
    """onnxruntime opens it by name after it was checked."""
    folder = copy_folder(onnx_model(tensor_type="F32"), tmp_path / "copy")
    with OnnxModelFile(folder) as file:
        file.load()
        path = folder / DATA_NAME
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.replace(path)
        with pytest.raises(FormatError, match="was replaced while it was read"):
            file.load()


def test_weights_that_cannot_be_mapped_are_named(
    onnx_model: OnnxModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a limit of the address space; it was taken for a full disk under stdout."""
    folder = onnx_model(tensor_type="F32")

    def refuse(descriptor: int) -> memoryview:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(data, "map_descriptor", refuse)
    with pytest.raises(ResourceError, match=f"{DATA_NAME}.* cannot be mapped .*ulimit -v"):
        OnnxModelFile(folder)


@pytest.mark.parametrize("verb", ["inspect", "run"])
@pytest.mark.parametrize("mib", [90, 115, 150])
def test_addresses_that_do_not_hold_onnxruntime(
    onnx_model: OnnxModelFactory, verb: str, mib: int
) -> None:
    """It was said to be missing, or OpenBLAS ended the process."""
    command = [sys.executable, "-m", "edgeh2o", verb, str(onnx_model())]
    refused = subprocess.run(
        [*command, *(["-p", "x"] if verb == "run" else [])],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib * 2**20,) * 2),
    )
    assert refused.returncode == 1 and "pip" not in refused.stderr
    assert "raise its limit (ulimit -v)" in refused.stderr.splitlines()[-1]
    assert len(refused.stderr.splitlines()) == 1


def test_onnxruntime_is_missing_or_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    full = ImportError("state.so: failed to map segment from shared object")
    monkeypatch.setattr(memory, "address_space_left_bytes", lambda: 40 * 2**20)
    for error in (full, ImportError("Exception caught: std::bad_alloc"), MemoryError()):
        found = explain_import(error)
        assert isinstance(found, ResourceError) and "40.0 MiB, does not hold onnx" in str(found)
    missing = explain_import(ModuleNotFoundError("No module named 'onnxruntime'"))
    assert isinstance(missing, UsageError) and "pip install" in str(missing)
    monkeypatch.setattr(memory, "address_space_left_bytes", lambda: None)
    assert isinstance(explain_import(full), UsageError)  # a file system without execution

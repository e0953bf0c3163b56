"""The GGUF reader on correct files, on the default model, and on paths that are not models."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import struct
import time
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeh2o import _core
from edgeh2o.errors import FormatError, ResourceError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.formats.gguf_types import (
    IK_TENSOR_TYPES,
    REMOVED_TENSOR_TYPES,
    TENSOR_TYPES,
)
from tests.formats import raw_gguf as raw

Kind = gguf_package.GGUFValueType
NUMBER_RANGES = {
    Kind.UINT8: (0, 2**8 - 1),
    Kind.INT8: (-(2**7), 2**7 - 1),
    Kind.UINT16: (0, 2**16 - 1),
    Kind.INT16: (-(2**15), 2**15 - 1),
    Kind.UINT32: (0, 2**32 - 1),
    Kind.INT32: (-(2**31), 2**31 - 1),
    Kind.UINT64: (0, 2**64 - 1),
    Kind.INT64: (-(2**63), 2**63 - 1),
}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def write_with_package(path: Path, entries: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Write through the gguf package. ``entries``: key -> (value, type, item type or None)."""
    writer = gguf_package.GGUFWriter(path, "test")
    for key, (value, kind, item_kind) in entries.items():
        writer.add_key_value(key, value, kind, item_kind)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_value(ours: object, expected: object) -> None:
    if isinstance(expected, list) and not (expected and isinstance(expected[0], str)):
        assert ours.tolist() == expected
    elif isinstance(expected, list):
        assert ours == tuple(expected)
    else:
        assert type(ours) is type(expected)
        assert ours == expected


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    entries = {
        **{
            f"scalar.{kind.name}.{edge}": (value, kind, None)
            for kind, bounds in NUMBER_RANGES.items()
            for edge, value in zip(("low", "high"), bounds, strict=True)
        },
        **{
            f"array.{kind.name}": (list(bounds), Kind.ARRAY, kind)
            for kind, bounds in NUMBER_RANGES.items()
        },
        "float32": (0.5, Kind.FLOAT32, None),
        "float64": (math.pi, Kind.FLOAT64, None),
        "true": (True, Kind.BOOL, None),
        "false": (False, Kind.BOOL, None),
        "string": ("\u00e9\U0001f600\n", Kind.STRING, None),
        "no text": ("", Kind.STRING, None),
        "float32s": ([1.5, -2.25], Kind.ARRAY, Kind.FLOAT32),
        "float64s": ([math.e], Kind.ARRAY, Kind.FLOAT64),
        "bools": ([True, False, True], Kind.ARRAY, Kind.BOOL),
        "strings": (["a", "", "\u4e2d"], Kind.ARRAY, Kind.STRING),
    }
    tensors = {
        "matrix": np.arange(15, dtype=np.float32).reshape(3, 5),
        "half": np.arange(7, dtype=np.float16),
        "cube": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    }
    path = write_with_package(tmp_path / "all.gguf", entries, tensors)

    with open_gguf(path) as file:
        assert file.header.version == 3
        assert file.metadata["general.architecture"] == "test"
        assert set(file.metadata) == {"general.architecture", *entries}
        for key, (value, _, _) in entries.items():
            assert_same_value(file.metadata[key], value)
        assert list(file.tensors) == list(tensors)
        for name, values in tensors.items():
            info = file.tensors[name]
            assert info.shape == values.shape[::-1]
            assert (info.rows, info.cols) == (values.size // values.shape[-1], values.shape[-1])
            assert bytes(file.tensor_bytes(info)) == values.tobytes()


def test_reads_version_2_and_empty_arrays(tmp_path: Path) -> None:
    keys = [
        raw.key("no numbers", raw.ARRAY, raw.array(raw.FLOAT32, [])),
        raw.key("no strings", raw.ARRAY, raw.array(raw.STRING, [])),
    ]
    with open_gguf(write(tmp_path / "v2.gguf", raw.gguf(keys, version=2))) as file:
        assert file.header.version == 2
        assert file.metadata["no numbers"].dtype == np.float32
        assert len(file.metadata["no numbers"]) == 0
        assert file.metadata["no strings"] == ()


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_honours_the_alignment_of_the_file(tmp_path: Path, alignment: int) -> None:
    keys = [raw.key("general.alignment", raw.UINT32, raw.u32(alignment))]
    second = -(-12 // alignment) * alignment
    entries = [raw.tensor("a", [3]), raw.tensor("b", [1], offset=second)]
    data = struct.pack("<3f", 1, 2, 3).ljust(second, b"\0") + struct.pack("<f", 4)
    content = raw.gguf(keys, entries, data, alignment=alignment)
    with open_gguf(write(tmp_path / "aligned.gguf", content)) as file:
        assert file.header.alignment == alignment
        assert file.header.data_offset % alignment == 0
        assert bytes(file.tensor_bytes(file.tensors["b"])) == struct.pack("<f", 4)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
numbers = st.sampled_from(sorted(NUMBER_RANGES)).flatmap(
    lambda kind: st.tuples(st.integers(*NUMBER_RANGES[kind]), st.just(kind), st.none())
)
number_lists = st.sampled_from(sorted(NUMBER_RANGES)).flatmap(
    lambda kind: st.tuples(
        st.lists(st.integers(*NUMBER_RANGES[kind]), min_size=1, max_size=9),
        st.just(Kind.ARRAY),
        st.just(kind),
    )
)
entries_of_a_file = st.dictionaries(
    names.filter(lambda name: name not in ("general.architecture", "general.alignment")),
    st.one_of(
        numbers,
        number_lists,
        st.tuples(st.booleans(), st.just(Kind.BOOL), st.none()),
        st.tuples(st.floats(allow_nan=False), st.just(Kind.FLOAT64), st.none()),
        st.tuples(texts, st.just(Kind.STRING), st.none()),
        st.tuples(
            st.lists(texts, min_size=1, max_size=9), st.just(Kind.ARRAY), st.just(Kind.STRING)
        ),
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(entries=entries_of_a_file)
def test_metadata_round_trip(tmp_path_factory: pytest.TempPathFactory, entries: dict) -> None:
    folder = tmp_path_factory.mktemp("round_trip")
    with open_gguf(write_with_package(folder / "m.gguf", entries, {})) as file:
        for key, (value, _, _) in entries.items():
            assert_same_value(file.metadata[key], value)


def test_tensor_types_agree_with_the_gguf_package() -> None:
    known = {
        kind.value: (kind.name, *gguf_package.GGML_QUANT_SIZES[kind])
        for kind in gguf_package.GGMLQuantizationType
    }
    ours = {
        number: (kind.name, kind.block_size, kind.block_bytes)
        for number, kind in TENSOR_TYPES.items()
    }
    known[9] = ("Q8_1", 32, 36)  # ggml's block; package 0.19 has its size before it lost 4 bytes
    assert {number: ours[number] for number in known} == known
    assert not set(ours) & {*REMOVED_TENSOR_TYPES, *IK_TENSOR_TYPES}
    assert set(_core.supported_types()) <= {kind.name for kind in TENSOR_TYPES.values()}


def test_agrees_with_the_gguf_package_on_the_default_model(smollm2_path: Path) -> None:
    oracle = gguf_package.GGUFReader(smollm2_path)
    with open_gguf(smollm2_path) as file:
        theirs = [
            (t.name, t.tensor_type.name, tuple(t.shape.tolist()), t.n_bytes, t.data_offset)
            for t in oracle.tensors
        ]
        ours = [(t.name, t.type_name, t.shape, t.n_bytes, t.offset) for t in file.tensors.values()]
        assert ours == theirs
        keys = [name for name in oracle.fields if not name.startswith("GGUF.")]
        assert list(file.metadata) == keys
        for key in keys:
            assert_same_value(file.metadata[key], oracle.fields[key].contents())
        last = oracle.tensors[-1]
        view = file.tensor_bytes(file.tensors[last.name])
        assert bytes(view) == last.data.tobytes()


def test_opens_a_large_vocabulary_fast(smollm2_path: Path) -> None:
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        with open_gguf(smollm2_path) as file:
            assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
        durations.append(time.perf_counter() - start)
    # 0.06 s on a 2.5 GHz core; the bound is what a reader with one object per field breaks.
    assert min(durations) < 0.5


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "small.gguf",
        raw.gguf_of(
            [raw.key("general.architecture", raw.STRING, raw.text("test"))],
            {"a": raw.f32_tensor(8, values=range(8)), "b": raw.f32_tensor(4, 2)},
        ),
    )


def test_tensor_bytes_are_read_only_and_outlive_the_file(small_file: Path) -> None:
    file = open_gguf(small_file)
    view = file.tensor_bytes(file.tensors["a"])
    assert view.readonly
    file.close()
    file.close()
    assert struct.unpack("<8f", view) == tuple(range(8))
    with pytest.raises(ValueError, match="is closed"):
        file.tensor_bytes(file.tensors["a"])


def test_what_would_be_a_copy_leaves_the_file_open(small_file: Path) -> None:
    with open_gguf(small_file) as gguf:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                make(gguf)
        gc.collect()
        assert gguf.read(0, 4) == b"GGUF"


def test_refuses_a_file_that_shrinks_while_open(small_file: Path) -> None:
    with open_gguf(small_file) as file:
        info = file.tensors["b"]
        os.truncate(small_file, info.offset + info.n_bytes - 1)
        with pytest.raises(FormatError, match="became shorter"):
            file.tensor_bytes(info)
        assert len(file.tensor_bytes(file.tensors["a"])) == 32


def test_a_read_error_is_a_resource_error(
    small_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with open_gguf(small_file) as file:
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(ResourceError, match=r"small\.gguf: cannot be read: Input/output error"):
            file.tensor_bytes(file.tensors["a"])
    with pytest.raises(ResourceError, match="cannot be read"):
        open_gguf(small_file)


def test_short_reads_are_continued(small_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pread
    with open_gguf(small_file) as file:
        monkeypatch.setattr(
            os, "pread", lambda descriptor, n_bytes, at: whole(descriptor, min(n_bytes, 7), at)
        )
        view = file.tensor_bytes(file.tensors["a"])
    assert struct.unpack("<8f", view) == tuple(range(8))


@pytest.mark.parametrize("first_read_bytes", [1, 7, 64])
def test_a_header_read_in_pieces_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_read_bytes: int
) -> None:
    strings = [("x" * n) for n in range(40)]
    path = write(
        tmp_path / "pieces.gguf",
        raw.gguf_of(
            [
                raw.key("strings", raw.ARRAY, raw.array(raw.STRING, strings)),
                raw.key("numbers", raw.ARRAY, raw.array(raw.UINT32, list(range(200)))),
            ],
            {"a": raw.f32_tensor(8)},
        ),
    )
    monkeypatch.setattr("edgeh2o.formats.gguf_cursor.FIRST_READ_BYTES", first_read_bytes)
    with open_gguf(path) as file:
        assert file.metadata["strings"] == tuple(strings)
        assert file.metadata["numbers"].tolist() == list(range(200))
        assert file.tensors["a"].n_bytes == 32


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"absent\.gguf: no such file"):
        open_gguf(tmp_path / "absent.gguf")


def test_paths_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    for path in (loop, tmp_path / ("x" * 300), "nul\0byte.gguf"):
        with pytest.raises(ResourceError, match="cannot be read"):
            open_gguf(path)

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ResourceError, match="cannot be read: Permission denied"):
        open_gguf(tmp_path / "closed.gguf")


def test_paths_that_are_not_regular_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    for path, problem in (
        (tmp_path, "is a directory"),
        (fifo, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
    ):
        with pytest.raises(FormatError, match=problem):
            open_gguf(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"GG", "not a GGUF file"),
        (b"random bytes that are nothing in particular", "check that it is the right file"),
        (b"\n<!DOCTYPE html><html><body>404</body></html>", "a web page"),
        (b"PK\x03\x04" + bytes(60), "a ZIP archive"),
        (struct.pack("<Q", 100) + b'{"__metadata__":{}}', "a safetensors file"),
        (b"\x08\x0a\x12\x07pytorch", r"an ONNX \(protobuf\) file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer"),
        (struct.pack("<I", 0x67676D6C), "an old GGML file"),
        (struct.pack("<II", 0x67676A74, 3), "an old GGJT file"),
        (struct.pack("<II", 0x67676D66, 1), "an old GGMF file"),
        (struct.pack("<I", 0x67676C61), "an old GGLA adapter"),
        (b"FUGG" + struct.pack(">I", 3), "a byte-swapped GGUF file"),
    ],
)
def test_says_what_other_files_are(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as caught:
        open_gguf(write(tmp_path / "other.gguf", content))
    assert "other.gguf" in str(caught.value)

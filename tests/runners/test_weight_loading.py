"""Weights are packed on a thread of their own: its errors, and errors elsewhere meanwhile."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.errors import FormatError, ResourceError
from edgeh2o.runners import native
from edgeh2o.runners.native import NativeModelFile

TinyModelFactory = Callable[..., Path]


@pytest.fixture
def path(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(tensor_type="Q4_0")


def _loading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "edgeh2o-load"]


def test_weights_are_those_of_tensors_set_one_by_one(path: Path) -> None:
    with NativeModelFile(path) as file:
        model = file.load()
        expected = _core.Model(native._decoder_config(file.config))
        for item in file._bindings:
            data = file._gguf.tensor_bytes(item.info)[item.first_byte :][: item.n_bytes]
            kind, shape = item.info.type_name, (item.n_rows, item.info.cols)
            expected.set_tensor(item.name, data, kind, *shape, item.row_order)
        for item in file._bindings:
            weights = model.dequantize(item.name)
            np.testing.assert_array_equal(weights, expected.dequantize(item.name))
    assert model.weight_bytes == expected.weight_bytes


@pytest.mark.parametrize("error", [FormatError("bad merges"), KeyboardInterrupt()])
def test_what_stops_the_tokenizer_stops_the_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_: object) -> None:
        assert _loading_threads()
        raise error

    # It reads until it is told to stop, so that the thread is there when the tokenizer fails.
    class Endless:
        n_bytes_done = 0

        def __init__(self, *_: object) -> None:
            self._is_cancelled = threading.Event()

        def run(self) -> None:
            assert self._is_cancelled.wait(60)

        def cancel(self) -> None:
            self._is_cancelled.set()

    monkeypatch.setattr(native, "build_tokenizer", fail)
    monkeypatch.setattr(_core, "WeightReader", Endless)
    with NativeModelFile(path) as file, pytest.raises(type(error)):
        file.load()
    assert not _loading_threads()


def test_a_tensor_that_the_core_refuses_names_the_file(path: Path) -> None:
    with NativeModelFile(path) as file:
        first = file._bindings[0]
        file._bindings[0] = replace(first, name="blk.99.attn_q.weight")
        with pytest.raises(FormatError, match=f"{path.name}: tensor 'blk.99.attn_q.weight' is not"):
            file.load()


def test_a_file_that_cannot_be_read(path: Path, tmp_path: Path) -> None:
    with NativeModelFile(path) as file:
        closed_for_reading = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
        reader = _core.WeightReader(
            _core.Model(native._decoder_config(file.config)),
            closed_for_reading,
            [("output_norm.weight", "F32", 0, 4, 1, 1, None)],
        )
        try:
            with pytest.raises(OSError, match="Bad file descriptor"):
                reader.run()
        finally:
            os.close(closed_for_reading)


def test_a_read_error_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        n_bytes_done = 0

        def __init__(self, *_: object) -> None: ...

        def run(self) -> None:
            raise OSError(5, "Input/output error")

        def cancel(self) -> None: ...

    monkeypatch.setattr(_core, "WeightReader", Broken)
    with NativeModelFile(path) as file:
        problem = f"{path.name}: cannot be read: Input/output error"
        with pytest.raises(ResourceError, match=problem):
            file.load()


def test_a_cancelled_reader_reads_no_more(path: Path) -> None:
    with NativeModelFile(path) as file:
        model = _core.Model(native._decoder_config(file.config))
        item = file._bindings[0]
        source = (item.name, item.info.type_name, item.info.offset, item.n_bytes)
        shape = (item.n_rows, item.info.cols, item.row_order)
        reader = _core.WeightReader(model, file._gguf.fileno(), [(*source, *shape)])
        reader.cancel()
        reader.run()
        assert (reader.n_bytes_done, model.weight_bytes) == (0, 0)

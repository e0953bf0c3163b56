"""Weights are packed on a thread of their own: its errors, and errors elsewhere meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeh2o import _core
from edgeh2o.errors import FormatError, ResourceError
from edgeh2o.runners.core_config import core_config
from edgeh2o.runners.native import NativeModelFile

TinyModelFactory = Callable[..., Path]


@pytest.fixture
def path(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(tensor_type="Q4_0")


def _loading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "edgeh2o-load"]


# The second has matrices that are read and packed in parts, the last part not of whole panels.
@pytest.mark.parametrize(
    "options", [{"tensor_type": "Q4_0"}, {"tensor_type": "F32", "ffn_dim": 33001, "n_layers": 1}]
)
def test_weights_are_those_of_tensors_set_one_by_one(
    tiny_model: TinyModelFactory, options: dict[str, object]
) -> None:
    with NativeModelFile(tiny_model(**options)) as file:
        model = file.load()
        expected = _core.Model(core_config(file.config))
        for item in file._bindings:
            data = file._gguf.tensor_bytes(item.info)[item.first_byte :][: item.n_bytes]
            kind, shape = item.info.type_name, (item.n_rows, item.info.cols)
            expected.set_tensor(item.name, data, kind, *shape, item.row_order)
        for item in file._bindings:
            weights = model.dequantize(item.name)
            np.testing.assert_array_equal(weights, expected.dequantize(item.name))
    assert model.weight_bytes == expected.weight_bytes


def test_weights_that_are_there_before_the_wait_are_reported(path: Path) -> None:
    reports: list[tuple[int, int]] = []
    with NativeModelFile(path) as file:
        file.load(
            on_bytes=lambda done, total: reports.append((done, total)),
            meanwhile=lambda: [thread.join() for thread in _loading_threads()],
        )
        assert reports == [(0, file.n_weight_bytes), (file.n_weight_bytes, file.n_weight_bytes)]


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

    monkeypatch.setattr(_core, "WeightReader", Endless)
    with NativeModelFile(path) as file, pytest.raises(type(error)):
        file.load(meanwhile=lambda: fail(None))
    assert not _loading_threads()
    monkeypatch.setattr("edgeh2o.tokenizer.build_tokenizer", fail)
    with NativeModelFile(path) as file, pytest.raises(type(error)):
        file.load()
    assert not _loading_threads()


@pytest.mark.parametrize("on_bytes", [None, lambda done, total: None])
def test_an_interrupted_wait_leaves_no_reader_at_work(
    path: Path, monkeypatch: pytest.MonkeyPatch, on_bytes: Callable[[int, int], None] | None
) -> None:
    """One that goes on reads from a file that was closed, and aborts a program that ends."""
    is_waited_for, is_cancelled = threading.Event(), threading.Event()
    ended: list[bool] = []

    class Slow:
        n_bytes_done = 0

        def __init__(self, *_: object) -> None: ...

        def run(self) -> None:
            assert is_waited_for.wait(60)
            while not is_cancelled.wait(0.05):  # some come before the wait has begun
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)  # the tensor at hand
            ended.append(True)

        def take_all_threads(self) -> None:
            is_waited_for.set()

        def cancel(self) -> None:
            is_cancelled.set()

    def interrupt(*_: object) -> None:
        if not is_cancelled.is_set():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    monkeypatch.setattr(_core, "WeightReader", Slow)
    try:
        with NativeModelFile(path) as file, pytest.raises(KeyboardInterrupt):
            file.load(on_bytes=on_bytes)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended


def test_weights_are_begun_before_what_takes_long_to_import(path: Path) -> None:
    script = (
        "import sys\n"
        "from edgeh2o import LLM\n"
        "from edgeh2o.runners.weight_loading import WeightLoading\n"
        "enter = WeightLoading.__enter__\n"
        "heavy = ('numpy', 'tokenizers', 'jinja2', 'logging')\n"
        "def report(loading):\n"
        "    print([name for name in heavy if name in sys.modules])\n"
        "    return enter(loading)\n"
        "WeightLoading.__enter__ = report\n"
        "LLM(sys.argv[1])\n"
        "print('numpy' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n") == ["[]", "True", ""]


def test_a_file_imports_neither_other_families_nor_other_formats(path: Path) -> None:
    others = ("models.apertus", "models.qwen2", "onnx.folder", "formats.safetensors")
    script = (
        "import sys\n"
        "from edgeh2o import LLM\n"
        "LLM(sys.argv[1])\n"
        f"print([name for name in {others!r} if f'edgeh2o.{{name}}' in sys.modules])\n"
        "print('edgeh2o.models.llama' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n") == ["[]", "True", ""]


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (np.arange(64, dtype=np.int64), "must be contiguous int32"),
        (np.arange(64, dtype=np.float32), "must be contiguous int32"),
        (np.arange(128, dtype=np.int32)[::2], "must be contiguous int32"),
        (np.arange(64, dtype=np.int32).reshape(8, 8), "must be contiguous int32"),
        (np.arange(63, dtype=np.int32), "entries"),
        (np.full(2**12, 2**12, np.int32), "is outside the|entries"),
    ],
)
def test_an_order_of_rows_that_cannot_be_one(
    path: Path, order: NDArray[np.generic], problem: str
) -> None:
    with NativeModelFile(path) as file:
        model = _core.Model(core_config(file.config))
        item = next(item for item in file._bindings if item.row_order is not None)
        data = file._gguf.tensor_bytes(item.info)
        shape = (item.n_rows, item.info.cols)
        with pytest.raises(ValueError, match=f"row_order.* {problem}"):
            model.set_tensor(item.name, data, item.info.type_name, *shape, order)


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
            _core.Model(core_config(file.config)),
            closed_for_reading,
            [("output_norm.weight", "F32", 0, 1024, 1, 256, None)],
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

        def take_all_threads(self) -> None: ...

        def cancel(self) -> None: ...

    monkeypatch.setattr(_core, "WeightReader", Broken)
    with NativeModelFile(path) as file:
        problem = f"{path.name}: cannot be read: Input/output error"
        with pytest.raises(ResourceError, match=problem):
            file.load()


def test_a_cancelled_reader_reads_no_more(path: Path) -> None:
    with NativeModelFile(path) as file:
        model = _core.Model(core_config(file.config))
        item = file._bindings[0]
        source = (item.name, item.info.type_name, item.info.offset, item.n_bytes)
        shape = (item.n_rows, item.info.cols, item.row_order)
        reader = _core.WeightReader(model, file._gguf.fileno(), [(*source, *shape)])
        reader.cancel()
        reader.run()
        assert (reader.n_bytes_done, model.weight_bytes) == (0, 0)

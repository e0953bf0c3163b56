"""What weights take while they are loaded: one copy of them, and little beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model
from edgeh2o.runners.core_config import core_config
from tests.cuda.host_library import SMALL
from tests.tiny_models import TinyModelFactory

BLOCK_BYTES = 256 * 2**20
# About 150 MB, of which the largest tensor is 4: what a loader holds beside the weights must be
# small against them. Float weights are as large on the device as in the file.
LARGE = {"n_layers": 10, "model_dim": 1024, "n_heads": 8, "n_kv_heads": 2, "head_dim": 64}
LARGE |= {"ffn_dim": 2048}
GEMMA4 = {"architecture": "gemma4", "n_layers": 3, "sliding_window": 20, "token_input_dim": 32}
# Prints how far the memory of the process grew while a model was loaded, after a small one that
# brought the libraries. The host device takes its memory from the same process, as a Jetson's GPU
# does from the same chips.
SCRIPT = """
import re, sys
from pathlib import Path
from edgeh2o.cuda.devices import open_device
from edgeh2o.engine.opening import open_model

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

device = open_device(0)
with open_model(Path(sys.argv[1]), device) as file:
    small = file.load()
with open_model(Path(sys.argv[2]), device) as file:
    before = kilobytes("VmRSS")
    model = file.load()
    print((kilobytes("VmHWM") - before) * 1024, model.weight_bytes, small.weight_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_loading_takes_little_more_than_the_weights(
    tiny_model: TinyModelFactory, host_environment: dict[str, str], tmp_path: Path
) -> None:
    """One copy of the weights and, beside it, less than a fifth of the file."""
    if "sanitized" in str(host_environment["EDGEH2O_LIBCUDA"]):
        pytest.skip("a sanitizer takes memory of its own")
    log = tmp_path / "log"
    path = tiny_model(**LARGE, tensor_type="F16")
    environment = os.environ | host_environment | {"EDGEH2O_HOST_DEVICE_LOG": str(log)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_model(**SMALL)), str(path)],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    grown, on_device, of_small = map(int, result.stdout.split())
    file_bytes = path.stat().st_size
    allocated = [int(n) for n in re.findall(r"^cuMemAlloc_v2 (\d+)", log.read_text(), re.M)]
    assert sum(allocated) == on_device + of_small
    assert 0.99 * file_bytes < on_device < 1.01 * file_bytes
    assert on_device < grown < 1.2 * file_bytes


@pytest.mark.usefixtures("host_device")
def test_memory_is_taken_in_blocks_of_256_mib(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is to come; for what little there is one that is no larger."""
    log = tmp_path / "log"
    device = open_device(0)
    taken = []
    for expected in (700 * 2**20, None):
        monkeypatch.setenv("EDGEH2O_HOST_DEVICE_LOG", str(log))
        log.write_text("")
        with open_model(tiny_model(**SMALL), device) as file:
            core_model = _core.DeviceModel(core_config(file.config), device)
            core_model.expect_bytes(expected or file.n_weight_bytes)
            with file._start_loading(core_model, file._bindings) as loading:
                loading.wait()
            core_model.finish()
        monkeypatch.delenv("EDGEH2O_HOST_DEVICE_LOG")
        taken.append([int(n) for n in re.findall(r"cuMemAlloc_v2 (\d+)", log.read_text())])
        del core_model
    assert taken[0] == [BLOCK_BYTES]
    assert sum(taken[1]) < 2 * 2**20


@pytest.mark.usefixtures("host_device")
@pytest.mark.parametrize(
    ("kilobytes", "options"),
    [
        (24, {"tensor_type": "Q8_0"}),
        # 64 rows are the smallest part of tiles.
        (21, {"tensor_type": "Q8_0", "ffn_dim": 320}),
        (11, {"tensor_type": "Q4_1", "ffn_dim": 320, "tied": False, "biases": True}),
        (10, {"tensor_type": "F16", "tied": False}),
        # A table of inputs per token, in parts of 256 rows and of 64.
        (14, {"tensor_type": "F16", **GEMMA4}),
    ],
    ids=str,
)
def test_matrices_larger_than_a_block_lie_in_parts(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kilobytes: int,
    options: dict[str, object],
) -> None:
    """No block is larger than it may be, and every logit is what it is of one part, bit by bit."""
    monkeypatch.setattr("edgeh2o.models.hyperparameters.TOKEN_INPUT_ROWS", 256)
    log, device = tmp_path / "log", open_device(0)
    block_bytes = kilobytes * 1024
    logits = []
    for size in (BLOCK_BYTES, block_bytes):
        monkeypatch.setenv("EDGEH2O_HOST_DEVICE_LOG", str(log))
        with open_model(tiny_model(**{**SMALL, **options}), device) as file:
            core_model = _core.DeviceModel(core_config(file.config), device, size)
            core_model.expect_bytes(file.n_weight_bytes)
            log.write_text("")
            with file._start_loading(core_model, file._bindings) as loading:
                loading.wait()
            core_model.finish()
        monkeypatch.delenv("EDGEH2O_HOST_DEVICE_LOG")
        session = _core.DeviceSequence(
            core_model, _core.dense_policy(), max_context=32, batch_size=32, chunk_size=32
        )
        tokens = np.array([3, 63, 64, 127, 128, 200, 319], np.int32)  # of every part
        logits.append([session.prefill(tokens, is_last=True), session.decode(300)])
    allocated = [int(n) for n in re.findall(r"cuMemAlloc_v2 (\d+)", log.read_text())]
    assert len(allocated) > 3
    assert max(allocated) <= block_bytes
    assert sum(allocated) < 1.5 * file.n_weight_bytes
    np.testing.assert_array_equal(logits[1], logits[0])

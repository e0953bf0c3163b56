"""Several threads and processes that keep the packed weights of one model."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from edgeh2o.formats import one_at_a_time
from edgeh2o.runners import packed_weights
from edgeh2o.runners.native import NativeModel, NativeModelFile
from tests.runners.kept_weights import is_mapped, kept_file, load, logits, made_files


def test_several_processes_at_once(path: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from edgeh2o import LLM, SamplingParams\n"
        "for _ in range(3):\n"
        "    with LLM(sys.argv[1], packed_weights=sys.argv[2]) as llm:\n"
        "        result = llm.generate('ab', SamplingParams(max_tokens=3, temperature=0))\n"
        "print(result.token_ids, 'mapped_weights' in result.stats.memory_bytes)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(path), str(tmp_path / "kept")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert len(set(outputs)) == 1
    assert outputs[0].endswith(" True\n")
    assert len(os.listdir(tmp_path / "kept")) == 1


def test_the_second_of_two_takes_what_the_first_has_packed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both packed the model and wrote the file."""
    waits, n_written = Event(), []
    try_lock, write = one_at_a_time._try_lock, packed_weights.write_packed_file

    def note_waiting(lock: Path) -> int | None:
        held = try_lock(lock)
        if held is None:
            waits.set()
        return held

    def write_late(*arguments: Any) -> None:
        n_written.append(1)
        assert waits.wait(60)
        write(*arguments)

    monkeypatch.setattr(one_at_a_time, "_try_lock", note_waiting)
    monkeypatch.setattr(packed_weights, "write_packed_file", write_late)
    monkeypatch.setattr(packed_weights, "WAIT_S", 60.0)

    def load(_: int) -> NativeModel:
        with NativeModelFile(path, packed_weights=str(tmp_path / "kept")) as file:
            return file.load()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(load, range(2))
    assert len(n_written) == 1
    assert is_mapped(first)
    assert is_mapped(second)
    np.testing.assert_array_equal(logits(first), logits(second))
    assert len(os.listdir(tmp_path / "kept")) == 1


@pytest.mark.parametrize("fails", ["held for ever", "no locks", "a pipe", "a link", "a folder"])
def test_a_lock_that_cannot_be_had_delays_at_most(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    load(path, tmp_path / "kept")
    file = kept_file(tmp_path / "kept")
    lock = file.with_suffix(packed_weights.LOCK_SUFFIX)
    file.unlink()
    with ExitStack() as stack:
        if fails == "held for ever":
            holder = stack.enter_context(lock.open("wb"))
            fcntl.flock(holder, fcntl.LOCK_EX)
            monkeypatch.setattr(packed_weights, "WAIT_S", 0.1)
        elif fails == "no locks":

            def refuse(*_: object) -> None:
                raise OSError(errno.ENOLCK, "no locks available")

            monkeypatch.setattr(one_at_a_time.fcntl, "flock", refuse)
        elif fails == "a pipe":
            os.mkfifo(lock)
        elif fails == "a link":
            lock.symlink_to(tmp_path / "elsewhere")
        else:
            lock.mkdir()
        assert is_mapped(load(path, tmp_path / "kept"))
        before = made_files(tmp_path / "kept")
        assert is_mapped(load(path, tmp_path / "kept"))
        assert made_files(tmp_path / "kept") == before
    assert not (tmp_path / "elsewhere").exists()


def test_a_process_that_is_killed_leaves_no_lock(path: Path, tmp_path: Path) -> None:
    load(path, tmp_path / "kept")
    file = kept_file(tmp_path / "kept")
    file.unlink()
    script = (
        "import os, sys\n"
        "from edgeh2o import LLM\n"
        "from edgeh2o.runners import packed_weights\n"
        "packed_weights.write_packed_file = lambda *_: os._exit(9)\n"
        "LLM(sys.argv[1], packed_weights=sys.argv[2])\n"
    )
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "kept")]
    assert subprocess.run(command, check=False).returncode == 9
    assert file.with_suffix(packed_weights.LOCK_SUFFIX).exists()
    load(path, tmp_path / "kept")
    assert os.listdir(tmp_path / "kept") == [file.name]

"""Row 29: memory, disks, interrupts, closed streams and small machines."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from edgeh2o.cli.progress import ProgressBars
from edgeh2o.engine.memory_fit import RESERVE_BYTES
from edgeh2o.errors import is_shortage
from edgeh2o.host import cgroup, memory
from tests.bad_input.refusal import Refusal, require_one_line
from tests.tiny_models import TinyModelFactory
from tests.transformers.folders import write_folder

TIMEOUT_S = 120
OPTIONS = ["-p", "the thing is", "-n", "4", "--temp", "0", "--ignore-eos"]
_CHUNKS = ["-b", "64", "-ub", "64", "--h2o-local", "16", "--h2o-heavy", "16"]
LARGE_CONTEXT = [*_CHUNKS, "-c", "100000"]  # that of a cache far above what a chunk takes


@pytest.fixture
def model(tiny_model: TinyModelFactory) -> str:
    return str(tiny_model(tensor_type="Q4_0"))


def _run(model: str, redirection: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the program under a shell, which can close streams."""
    command = [sys.executable, "-m", "edgeh2o", "run", model, *OPTIONS, *options]
    return subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} {redirection}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize(
    ("n_free_bytes", "problem"),
    [
        (100_000, r"needs .*weights .*KiB.* and 98 KiB are available; no context fits: free mem"),
        (16 * 2**20, r"needs .*kv cache .* 16.0 MiB are available; the largest .* is -c \d+"),
    ],
)
def test_memory_below_weights_or_cache(
    model: str,
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    n_free_bytes: int,
    problem: str,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: RESERVE_BYTES + n_free_bytes)
    monkeypatch.setattr(memory, "binding_limit", str)  # this test may run in a container
    refusal(
        ["run", model, *OPTIONS, *LARGE_CONTEXT],
        code=1,
        problem=problem,
        max_python_bytes=16 * 2**20,
    )


@pytest.mark.parametrize(
    ("n_free_bytes", "problem"),
    [
        (100_000, "within the limit of this control group or container; no context .* raise that"),
        (16 * 2**20, r"within the limit of this control .*; the largest context .* is -c \d+"),
    ],
)
def test_a_container_with_less_memory_is_named(
    model: str,
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    n_free_bytes: int,
    problem: str,
) -> None:
    monkeypatch.setattr(cgroup, "memory_left_bytes", lambda: RESERVE_BYTES + n_free_bytes)
    refusal(["run", model, *OPTIONS, *LARGE_CONTEXT], code=1, problem=problem)


def _limited(model: str, mib: int, context: int) -> subprocess.CompletedProcess[str]:
    """A run with so much address space."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib * 2**20,) * 2)

    command = [sys.executable, "-m", "edgeh2o", "run", model, *OPTIONS, "--quiet"]
    return subprocess.run(
        [*command, "--threads", "2", "-c", str(context)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        preexec_fn=limit,
    )


@pytest.mark.parametrize("mib", [300, 400, 700])
def test_the_context_named_under_a_limit_of_addresses_works(smollm2_path: Path, mib: int) -> None:
    """300 leaves room for the weights of 92 MiB only: the libraries, threads and blocks count."""
    model = str(smollm2_path)
    refused = _limited(model, mib, 1_000_000)
    assert refused.returncode == 1
    require_one_line(refused.stderr)
    named = re.search(r"the largest context that fits is -c (\d+)", refused.stderr)
    assert (named is None) == (mib == 300), refused.stderr
    if named is not None:
        assert _limited(model, mib, int(named[1])).returncode == 0
    else:
        assert "of addresses (ulimit -v); no context fits: raise that limit" in refused.stderr
        assert _limited(model, mib, 256).returncode == 1


@pytest.mark.parametrize("mib", [80, 100, 120, 140])
def test_addresses_that_do_not_hold_the_libraries(smollm2_path: Path, mib: int) -> None:
    refused = _limited(str(smollm2_path), mib, 256)
    assert refused.returncode == 1
    require_one_line(refused.stderr)
    assert "does not hold the libraries; raise its limit (ulimit -v)" in refused.stderr


@pytest.mark.parametrize("limit_kb", [30_000, 45_000, 60_000, 75_000, 110_000, 170_000])
def test_no_limit_of_addresses_brings_a_traceback(
    tmp_path: Path, tiny_model: TinyModelFactory, limit_kb: int
) -> None:
    """NumPy's traceback has 56 lines, and OpenBLAS ends a process with a line of its own."""
    model = str(tiny_model())
    folder = str(write_folder(Path(model), tmp_path / "folder"))
    (tmp_path / "text.txt").write_text("the thing is " * 20)
    for arguments in (
        ["run", model, *OPTIONS],
        ["run", folder, *OPTIONS],
        ["inspect", model],
        ["inspect", folder],
        ["perplexity", model, "-f", str(tmp_path / "text.txt")],
        ["quantize", folder, str(tmp_path / "out.gguf"), "q8_0"],
    ):
        result = subprocess.run(
            [sys.executable, "-m", "edgeh2o", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_kb * 1024,) * 2),
        )
        if result.returncode == 0:  # the largest holds what some of them need
            assert limit_kb == 170_000
            continue
        assert result.returncode == 1, result.stderr
        require_one_line(result.stderr)
        assert limit_kb == 170_000 or "(ulimit -v)" in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libgfortran.so.5: failed to map segment from shared object"),
        ImportError("libx.so: cannot open shared object file: Cannot allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        MemoryError(),
    ],
    ids=str,
)
def test_short_memory_is_told_apart(error: Exception) -> None:
    assert is_shortage(error)
    try:
        try:
            raise error
        except Exception as cause:
            raise ImportError("Importing the numpy C-extensions failed") from cause
    except ImportError as caught:
        assert is_shortage(caught)
    assert not is_shortage(ImportError("No module named 'numpy'"))
    assert not is_shortage(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    assert not is_shortage(RuntimeError("oops"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [["--quiet"], ["--json"]])
def test_a_full_disk_under_stdout(model: str, options: list[str]) -> None:
    result = _run(model, "> /dev/full", *options)
    assert result.returncode == 1
    require_one_line(result.stderr)
    assert "standard output: No space left on device; free some space" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["doctor"]])
def test_a_full_disk_under_a_help(arguments: list[str]) -> None:
    command = shlex.join([sys.executable, "-m", "edgeh2o", *arguments])
    result = subprocess.run(
        ["sh", "-c", f"{command} > /dev/full"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    require_one_line(result.stderr)
    assert "standard output: No space left on device; free some space" in result.stderr


def test_a_help_whose_reader_went_away() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "edgeh2o", "run", "--help"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_a_full_disk_under_both_streams_ends_with_the_code(model: str) -> None:
    assert _run(model, "> /dev/full 2> /dev/full", "--quiet").returncode == 1


def test_closed_stdout_is_refused(model: str) -> None:
    result = _run(model, ">&-")
    assert result.returncode == 2
    require_one_line(result.stderr)
    assert "standard output is closed" in result.stderr


def test_closed_stdin_is_an_empty_prompt(model: str) -> None:
    command = [sys.executable, "-m", "edgeh2o", "run", model, "-"]
    result = subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} <&-"],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 2
    require_one_line(result.stderr)
    assert "the prompt is empty" in result.stderr


def test_closed_stderr_does_not_mix_into_the_answer(model: str) -> None:
    expected = _run(model)
    assert expected.returncode == 0
    assert _run(model, "2>&-").stdout == expected.stdout


# Ctrl-C while decoding is in tests/cli/test_run.py.
@pytest.mark.parametrize("stage", ["load", "prefill"])
def test_ctrl_c_ends_a_stage_and_a_second_run_works(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    """A real signal, raised from inside the stage's own progress report."""

    def interrupt(bars: ProgressBars, name: str, done: int, total: int) -> None:
        if name == stage and done < total and (done or name == "load"):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBars, "__call__", interrupt)
        assert main(["run", model, *OPTIONS]) == 130
    captured = capsys.readouterr()
    assert captured.out.strip() == ""
    assert "interrupted" in captured.err
    assert "Traceback" not in captured.err
    assert main(["run", model, *OPTIONS, "--quiet"]) == 0


# A signal when a file is written and has not its name yet.
ENDED_WHILE_IT_WRITES = """
import os, signal, sys, time

number = int(sys.argv.pop())

def fsync(descriptor):
    signal.raise_signal(number)
    time.sleep(60)

os.fsync = fsync
from edgeh2o.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("command", [["quantize", "out.gguf", "q8_0"], ["export-onnx", "folder"]])
def test_what_is_written_vanishes_when_a_terminal_is_closed(
    model: str, tmp_path: Path, command: list[str], number: int
) -> None:
    """A hidden file of the model's size stayed."""
    words = [command[0], model, *command[1:]]
    if command[0] == "quantize":
        words.append("--allow-requantize")
    result = subprocess.run(
        [sys.executable, "-c", ENDED_WHILE_IT_WRITES, *words, str(int(number))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert (result.returncode, result.stdout) == (128 + number, "")
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_cpu(model: str) -> None:
    cpu = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "edgeh2o", "run", model, *OPTIONS, "--json"]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
        preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
    )
    values = json.loads(result.stdout)
    assert values["threads"] == 1
    assert values["generated_tokens"] == 4


def test_without_proc(model: str) -> None:
    """In a mount namespace of its own, /proc is covered by an empty file system."""
    expected = _run(model)
    namespace = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    command = [sys.executable, "-m", "edgeh2o", "run", model, *OPTIONS]
    try:
        probe = subprocess.run([*namespace, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if probe.returncode:
        pytest.skip("needs the right to mount")
    result = subprocess.run(
        [*namespace, *command], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected.stdout
    assert "first token" in result.stderr

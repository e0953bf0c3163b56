"""The driver: found, missing, failing, and what is asked of it in which order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from edgeh2o import ResourceError, UsageError
from edgeh2o.config import RuntimeConfig
from edgeh2o.cuda import images
from edgeh2o.cuda.devices import VARIABLE, choose_device, choose_image
from tests.cuda.host_library import SMALL
from tests.tiny_models import TinyModelFactory
from tools.fetch_libcuda import find_libcuda

RUN = ("-p", "the", "-n", "3", "--temp", "0", "--quiet", "-c", "64", "--ignore-eos")


def edgeh2o(
    *arguments: str | Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgeh2o", *map(str, arguments)]
    everything = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, env=everything, timeout=300)


def run_on_device(
    path: Path, environment: dict[str, str], *more: str
) -> subprocess.CompletedProcess[str]:
    arguments = ("run", path, *RUN, "--attention", "dense", "--device", "cuda", *more)
    return edgeh2o(*arguments, environment=environment)


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error; nothing else was said and nothing printed."""
    assert result.returncode == 1, result.stderr + result.stdout
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "warning: a context" not in line]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("name", "variable", "expected"),
    [
        ("cpu", "cuda", None),
        ("cuda", "", 0),
        ("cuda:3", "cpu", 3),
        ("auto", "", None),
        ("auto", "auto", None),
        ("auto", "cuda:1", 1),
    ],
)
def test_names_of_devices(
    monkeypatch: pytest.MonkeyPatch, name: str, variable: str, expected: int | None
) -> None:
    monkeypatch.setenv(VARIABLE, variable)
    assert choose_device(name) == expected


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "", 1])
def test_bad_names_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(UsageError, match="auto, cpu, cuda or cuda:N"):
        RuntimeConfig(device=name)
    if name:
        monkeypatch.setenv(VARIABLE, str(name))
        with pytest.raises(UsageError, match=VARIABLE):
            choose_device("auto")


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 7), "sm_87"), ((11, 0), "sm_110"), ((8, 0), "compute_80"), ((9, 0), "compute_80")],
)
def test_the_image_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], target: str
) -> None:
    made_by = {name: "NVRTC" for name in ("compute_80", "sm_87", "sm_110")}
    (tmp_path / "images.json").write_text(json.dumps({"images": made_by}), encoding="ascii")
    for name in made_by:
        (tmp_path / f"kernels_{name}.z").write_bytes(zlib.compress(name.encode()))
    monkeypatch.setenv(images.VARIABLE, str(tmp_path))
    assert choose_image(capability).read() == target.encode()
    with pytest.raises(ResourceError, match=r"7\.2 and the kernels need 8\.0"):
        choose_image((7, 2))
    (tmp_path / "kernels_compute_80.z").unlink()
    with pytest.raises(ResourceError, match=r"without code for a GPU of compute capability 9\.1"):
        choose_image((9, 1))


def test_without_a_driver(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    environment = {"EDGEH2O_LIBCUDA": str(tmp_path / "libcuda.so.1")}
    message = refusal(run_on_device(tiny_model(**SMALL), environment))
    assert "there is no NVIDIA driver" in message
    assert "--device cpu" in message
    result = edgeh2o("doctor", environment=environment)
    assert result.returncode == 0
    assert "there is no NVIDIA driver" in result.stdout


def test_with_a_library_that_is_no_driver(tiny_model: TinyModelFactory) -> None:
    environment = {"EDGEH2O_LIBCUDA": "libm.so.6"}
    message = refusal(run_on_device(tiny_model(**SMALL), environment))
    assert "libm.so.6 has no cuInit" in message


def test_with_a_real_driver_and_no_device(tiny_model: TinyModelFactory) -> None:
    """The driver's own library, of the system or fetched: it is opened, and finds nothing."""
    library = str(find_libcuda() or "libcuda.so.1")
    start = f"import ctypes; raise SystemExit(ctypes.CDLL({library!r}).cuInit(0) != 100)"
    if subprocess.run([sys.executable, "-c", start], capture_output=True).returncode != 0:
        pytest.skip("no driver's library, or a GPU: python -m tools.fetch_libcuda gets the former")
    environment = {"EDGEH2O_LIBCUDA": library}
    message = refusal(run_on_device(tiny_model(**SMALL), environment))
    assert "finds no GPU" in message
    result = edgeh2o("doctor", environment=environment)
    assert result.returncode == 0
    assert "finds no GPU" in result.stdout


def test_without_images(
    tiny_model: TinyModelFactory, host_environment: dict[str, str], tmp_path: Path
) -> None:
    environment = host_environment | {images.VARIABLE: str(tmp_path)}
    message = refusal(run_on_device(tiny_model(**SMALL), environment))
    assert "built without code for GPUs" in message


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("cuInit=100", "finds no GPU"),
        ("cuInit=802", "cannot be started"),
        ("cuModuleLoadData=222", "driver is too old"),
        ("cuModuleLoadData=209", "driver is too old"),
        ("cuMemAlloc_v2=2", "no memory left"),
        ("cuMemAlloc_v2@5=2", "no memory left"),
        ("cuMemHostAlloc=2", "no memory left"),
        ("cuStreamSynchronize@4=719", "CUDA_ERROR_LAUNCH_FAILED (719)"),
        ("cuLaunchKernel@8=700", "CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
        ("cuModuleGetFunction=500", "finding a kernel"),
    ],
)
def test_every_failure_is_one_error(
    tiny_model: TinyModelFactory, host_environment: dict[str, str], failure: str, said: str
) -> None:
    environment = host_environment | {"EDGEH2O_HOST_DEVICE_FAIL": failure}
    message = refusal(run_on_device(tiny_model(**SMALL), environment))
    assert said in message
    assert "--device cpu" in message


def test_the_cpu_serves_where_a_device_was_lost(
    tiny_model: TinyModelFactory, host_environment: dict[str, str]
) -> None:
    """Every call after it is an error of a line, and another model of the same process works."""
    script = (
        "import sys\n"
        "from edgeh2o import LLM, ResourceError, SamplingParams\n"
        "once = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)\n"
        "options = {'context_size': 64, 'attention': 'dense'}\n"
        "with LLM(sys.argv[1], device='cuda', **options) as llm:\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            llm.generate('the', once)\n"
        "        except ResourceError as error:\n"
        "            print(str(error).splitlines())\n"
        "with LLM(sys.argv[1], device='cpu', **options) as llm:\n"
        "    print(llm.generate('the', once).token_ids)\n"
    )
    path = tiny_model(**SMALL)
    outputs = []
    for failure in ("", "cuLaunchKernel@40=719"):
        environment = os.environ | host_environment | {"EDGEH2O_HOST_DEVICE_FAIL": failure}
        command = [sys.executable, "-c", script, str(path)]
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=120
        )
        assert result.returncode == 0, result.stderr
        outputs.append(result.stdout.splitlines())
    (answer,), (*errors, same) = outputs
    assert same == answer
    assert len(errors) == 2
    for line in errors:
        assert "CUDA_ERROR_LAUNCH_FAILED (719)" in line
        assert "start anew, or use --device cpu" in line


def test_two_processes_at_once(
    tiny_model: TinyModelFactory, host_environment: dict[str, str]
) -> None:
    path = tiny_model(**SMALL)
    command = [sys.executable, "-m", "edgeh2o", "run", str(path), *RUN, "--attention", "dense"]
    everything = os.environ | host_environment
    running = [
        subprocess.Popen(
            [*command, "--device", "cuda"], env=everything, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [each.communicate(timeout=120)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0]
    assert answers[0] == answers[1] == edgeh2o(*command[3:], environment={}).stdout


def test_a_device_that_is_not_there(
    tiny_model: TinyModelFactory, host_environment: dict[str, str]
) -> None:
    result = run_on_device(tiny_model(**SMALL), host_environment, "--device", "cuda:4")
    assert "there is no device cuda:4, only 1" in refusal(result)


@pytest.mark.parametrize(("limit", "said"), [(2**16, "a model of"), (70 * 2**20, "a context of")])
def test_memory_is_checked_before_it_is_taken(
    tiny_model: TinyModelFactory,
    host_environment: dict[str, str],
    tmp_path: Path,
    limit: int,
    said: str,
) -> None:
    log = tmp_path / "log"
    environment = host_environment | {
        "EDGEH2O_HOST_DEVICE_MEMORY": str(limit),
        "EDGEH2O_HOST_DEVICE_LOG": str(log),
    }
    message = refusal(run_on_device(tiny_model(**SMALL), environment, "-c", "65536"))
    assert said in message
    n_allocated = log.read_text().count("cuMemAlloc_v2")
    assert n_allocated == 0 if said == "a model of" else n_allocated <= 2


def test_the_largest_context_that_inspect_names_runs(
    tiny_model: TinyModelFactory, host_environment: dict[str, str]
) -> None:
    environment = host_environment | {"EDGEH2O_HOST_DEVICE_MEMORY": str(67 * 2**20)}
    path = tiny_model(**SMALL)
    sizes = ("-b", "256", "-ub", "64", "--device", "cuda", "--attention", "dense")
    shown = edgeh2o("inspect", path, "-c", "16384", "--json", *sizes, environment=environment)
    assert shown.returncode == 0, shown.stderr
    largest = json.loads(shown.stdout)["memory_bytes"]["largest_context_that_fits"]
    assert 256 <= largest < 16384
    fits = run_on_device(path, environment, *sizes, "-c", str(largest))
    assert fits.returncode == 0, fits.stderr
    too_long = run_on_device(path, environment, *sizes, "-c", str(largest + 256))
    assert "a context of" in refusal(too_long)


def test_the_cpu_never_opens_a_driver(
    tiny_model: TinyModelFactory, host_environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    environment = host_environment | {"EDGEH2O_HOST_DEVICE_LOG": str(log)}
    result = edgeh2o("run", tiny_model(**SMALL), *RUN, environment=environment)
    assert result.returncode == 0, result.stderr
    assert not log.exists()


def test_what_is_asked_of_the_driver(
    tiny_model: TinyModelFactory, host_environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    environment = host_environment | {"EDGEH2O_HOST_DEVICE_LOG": str(log)}
    path = tiny_model(**SMALL)
    result = run_on_device(path, environment)
    assert result.returncode == 0, result.stderr
    calls = [line.split(" ") for line in log.read_text().splitlines()]
    names = [call[0] for call in calls]
    order = ["cuInit", "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuModuleLoadData"]
    assert [name for name in dict.fromkeys(names) if name in order] == order
    # One copy of the weights, in as few blocks as they need; nothing is allocated while it runs.
    first_launch = names.index("cuLaunchKernel")
    assert "cuMemAlloc_v2" not in names[first_launch:]
    assert "cuMemHostAlloc" not in names[first_launch:]
    allocated = [int(call[1]) for call in calls if call[0] == "cuMemAlloc_v2"]
    assert max(allocated) <= 256 * 2**20
    assert allocated[0] < 1.1 * path.stat().st_size
    # All that was taken is given back.
    assert names.count("cuMemAlloc_v2") == names.count("cuMemFree_v2")
    assert names.count("cuMemHostAlloc") == names.count("cuMemFreeHost")
    assert names[-1] == "cuDevicePrimaryCtxRelease_v2"
    # The layers: 15 kernels each for float weights, and what is before and after them.
    launches = [call[1] for call in calls if call[0] == "cuLaunchKernel"]
    assert launches[0] == "embed_rows"
    assert launches.count("attend_split") == launches.count("rope_rows")


def test_the_calls_of_a_prompt_and_a_token(
    tiny_model: TinyModelFactory, host_environment: dict[str, str], tmp_path: Path
) -> None:
    """Kernels, copies and waits in order, with their sizes, on the one stream that there is."""
    log = tmp_path / "log"
    environment = host_environment | {"EDGEH2O_HOST_DEVICE_LOG": str(log)}
    path = tiny_model(**SMALL, tensor_type="Q8_0")
    script = (
        "import sys, numpy\n"
        "from edgeh2o.attention.dense import DenseConfig\n"
        "from edgeh2o.cuda.devices import open_device\n"
        "from edgeh2o.engine.opening import open_model\n"
        "from edgeh2o.runners.base import SessionShape\n"
        "from pathlib import Path\n"
        "model = open_model(Path(sys.argv[1]), open_device(0)).load()\n"
        "shape = SessionShape(max_context=64, batch_size=32, chunk_size=16, cache_type='f16')\n"
        "runner = model.start_session(DenseConfig(), shape)\n"
        "runner.prefill(numpy.arange(5, 15, dtype=numpy.int32), is_last=True)\n"
        "for token in 7, 8, 9: runner.decode(token)\n"
    )
    everything = os.environ | environment
    subprocess.run([sys.executable, "-c", script, str(path)], env=everything, check=True)
    lines = log.read_text().splitlines()
    calls = [line.split() for line in lines]
    names = [call[0] for call in calls]
    assert names.count("cuStreamCreate") == 1
    streams = {line.split(" stream ")[1] for line in lines if " stream " in line}
    assert streams == {"1"}

    rows, token = 10, 1
    vocab, heads, n_layers = 320, 4, 2
    expected = []

    def product(n: int, *widths: int) -> list[str]:
        if n < 8:  # matrices of one format together
            return [f"multiply_q8 {sum(-(-width // 16) for width in widths)} {n} 1"]
        return [f"gemm_q8 {-(-width // 64)} {-(-n // 64)} 1" for width in widths]

    def layer_of(n: int, n_outputs: int) -> list[str]:
        calls = [f"norm_rows {n} 1 1", *product(n, 64, 32, 32), f"rope_rows {heads + 4} {n} 1"]
        n = n_outputs
        # Queries in eights; ranges of 128 keys.
        for some in [8] * (n // 8) + [n % 8] * (n % 8 > 0):
            calls += [f"attend_split 1 2 {some}", f"combine_splits {heads} {some} 1"]
        calls += [f"norm_rows {n} 1 1", *product(n, 64)]
        calls += [f"norm_rows {n} 1 1", *product(n, 96, 96), f"gate_rows {n} 1 1"]
        return [*calls, *product(n, 64)]

    for n in (rows, token):
        copies = [f"up {(1 + n) * 4}", *[f"up {n * 8 * 4}"] * 2]  # position, tokens; cos and sin
        # A prompt reports between layers, a token does not; of the last one only its last row
        # goes on.
        between = ["wait"] if n > 1 else []
        layers = [*[*layer_of(n, n), *between] * (n_layers - 1), *layer_of(n, 1), *between]
        logits = ["norm_rows 1 1 1", f"multiply_q8 {vocab // 16} 1 1", f"down {vocab * 4}", "wait"]
        asked = [*copies, f"embed_rows {n} 1 1", *layers, *logits, "wait"]
        expected += asked
    # The second token is recorded, and like the third it is one call.
    replay = [f"replay {len(asked) - 2}", "wait", "wait"]
    expected += ["record", *asked[:-2], "end", *replay, *replay]

    words = {"cuMemcpyHtoDAsync_v2": "up", "cuMemcpyDtoHAsync_v2": "down"}
    words |= {"cuStreamBeginCapture_v2": "record", "cuStreamEndCapture": "end"}
    words |= {"cuGraphLaunch": "replay", "cuStreamSynchronize": "wait"}
    actual = []
    for call in calls:
        if call[0] == "cuLaunchKernel":
            actual.append(" ".join(call[1:5]))
        elif call[0] in words:
            actual.append(" ".join([words[call[0]], *call[1:2]]).removesuffix(" stream"))
    first = actual.index(f"embed_rows {rows} 1 1") - 3
    assert actual[first : first + len(expected)] == expected
    assert set(actual[first + len(expected) :]) == {"wait"}  # before memory is given back
    made = [name for name in names if name.startswith("cuGraph") and name != "cuGraphLaunch"]
    assert made == ["cuGraphInstantiateWithFlags", "cuGraphDestroy", "cuGraphExecDestroy"]


def test_environment_chooses_the_device(
    tiny_model: TinyModelFactory, host_environment: dict[str, str]
) -> None:
    arguments = ("run", tiny_model(**SMALL), *RUN, "--attention", "dense", "--verbose")
    arguments = tuple(word for word in arguments if word != "--quiet")
    environment = host_environment | {VARIABLE: "cuda"}
    on_device = edgeh2o(*arguments, environment=environment)
    on_cpu = edgeh2o(*arguments, environment=host_environment)
    assert on_device.returncode == on_cpu.returncode == 0, on_device.stderr
    assert on_device.stdout == on_cpu.stdout
    assert "device: cuda:0 (host device (emulated), compute capability 8.7)" in on_device.stderr
    assert "device:" not in on_cpu.stderr


def test_doctor_shows_devices(host_environment: dict[str, str]) -> None:
    result = edgeh2o("doctor", environment=host_environment)
    assert result.returncode == 0, result.stderr
    assert "host device (emulated)" in result.stdout
    assert re.search(r"usable +yes\n +self_test +passed\n", result.stdout)


@pytest.mark.parametrize("kernel", ["norm_rows", "multiply_q8", "gemm_q4_min"])
def test_doctor_finds_a_device_that_computes_wrongly(
    host_environment: dict[str, str], kernel: str
) -> None:
    environment = host_environment | {"EDGEH2O_HOST_DEVICE_SKIP": kernel}
    result = edgeh2o("doctor", environment=environment)
    assert result.returncode == 0, result.stderr
    assert re.search(r"usable +no\n +self_test +(rows are rounded|\w+ gives wrong)", result.stdout)

"""Runs an aarch64 wheel in an emulated Python and compares its answers with this machine's.

    python -m tools.run_wheel_aarch64 [build/wheels-aarch64/edgeh2o-*-cp311-*.whl]

The wheel and its dependencies (aarch64 wheels of NumPy, tokenizers, ... from the package index) go
into a Python of Debian arm64 under qemu-user. There `edgeh2o run` answers a prompt with sparse
prefill; text, greedy tokens and logits must be those of the edgeh2o that runs this script. The
models are small random ones, of float and of 4-bit weights, or --model. The wheel must hold the
kernels for GPUs, if they are built here, and refuse a GPU in a line for want of a driver. With
--tests FOLDER ... pytest runs those in the same place instead. Without a wheel it is built first.
--quick is for CI: a wheel of tools.quick_wheel_aarch64 and what tools.build_wheel_aarch64 --fetch
has got, one answer, and the refusal of a GPU.

Exit status: 0 equal, 1 not, 77 skipped because a tool is missing (stderr names it).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tools import build_wheel_aarch64
from tools.aarch64_packages import PackageError
from tools.aarch64_python import (
    SUITES,
    EmulatedPython,
    InstallError,
    find_missing,
    install_python,
)
from tools.build_cuda_images import IMAGES, LIST_NAME, TARGETS, are_current, find_nvrtc
from tools.build_wheel_aarch64 import BUILD, PYTHON, BuildError
from tools.cross_check_aarch64 import CheckFailedError
from tools.make_tiny_model import write_tiny_model
from tools.quick_wheel_aarch64 import build_quick_wheel

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77
PROBE = ROOT / "tools" / "aarch64_probe.py"
# What refuses a GPU there.
NO_DRIVER = "there is no NVIDIA driver"
# The instruction set that each processor model of qemu must choose by itself.
PROCESSORS = {"cortex-a76": "neon_dotprod", "cortex-a72": "neon", "max": "neon_i8mm"}
QUICK_PROCESSOR = "cortex-a76"
ATTENTION = ("h2o", "headwise")
# Attention precisions of each beside f32; the scalar kernels have them all.
NARROW = {"cortex-a76": ("f16",), "max": ("f16", "bf16")}
# Largest relative error by tensor type. Sums run in another order, and where that carries an
# activation across a rounding step of its 8 bits it moves by a whole step. Measured with these
# models on x86 between avx512vnni and scalar: 2e-5 and 3e-2.
TOLERANCES = {"F32": 1e-4, "Q4_0": 5e-2}
# Where weights of the attention are rounded, to f16 and more so to bf16, one may round otherwise.
NARROW_TOLERANCE = 1e-2
# SmolLM2-135M in Q4_1 differs by 0.11 between avx2 and avx512vnni, as memory sets change with it.
MODEL_TOLERANCE = 0.2
MODEL = {
    "n_layers": 4,
    "model_dim": 256,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 32,
    "ffn_dim": 512,
    "context_length": 4096,
    "seed": 4,  # its greedy tokens lead by more than the differences between instruction sets
}
WORDS = "the art of the thing is that it is there and for all that he was in the house on a hill"
N_WORDS, QUICK_WORDS = 500, 150
RUN_OPTIONS = ["-n", "24", "--temp", "0", "-b", "256", "-ub", "64", "--budget", "96", "--json"]
# x86 may take bf16 by itself, aarch64 does not.
RUN_OPTIONS += ["--attention-precision", "f32"]


class DifferentError(Exception):
    """An answer is not the one of this machine, or a command failed; the message says which."""


def checked(result: subprocess.CompletedProcess[str], what: str) -> str:
    if result.returncode != 0:
        raise DifferentError(f"{what} failed:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout


def run_here(arguments: Sequence[str | Path], **variables: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    return checked(result, "edgeh2o on this machine")


def relative_error(logits: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over the standard deviation of the expected logits."""
    difference = logits.astype(np.float64) - expected
    return float(np.sqrt(np.mean(difference**2)) / np.std(expected))


def compare_logits(
    python: EmulatedPython, processor: str, probe: Sequence[str | Path], out: Path, tolerance: float
) -> None:
    """Runs the probe in both places; logits must be nearly equal, in f32 greedy tokens quite."""
    attention, precision = probe[-2:]
    here, there = (out / f"{place}-{attention}-{precision}.npz" for place in ("here", "there"))
    run_here([*probe, here], **({} if precision == "f32" else {"EDGEH2O_ISA": "scalar"}))
    started = time.monotonic()
    result = python.run(processor, [*probe, there, here])
    isa = checked(result, f"the probe on {processor}").strip()
    if isa != PROCESSORS.get(processor, isa):
        raise DifferentError(f"{processor}: {isa} is in use, not {PROCESSORS[processor]}")
    with np.load(here) as x86, np.load(there) as arm:
        expected, actual, n_tokens = x86["logits"], arm["logits"], int(x86["n_tokens"])
    is_same = actual.argmax(axis=1) == expected.argmax(axis=1)
    error = relative_error(actual, expected)
    print(
        f"{processor} ({isa}), {attention}, {precision}, prompt of {n_tokens} tokens: relative "
        f"error of the logits {error:.1e}, {is_same.sum()} of {len(is_same)} greedy tokens equal, "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    if error > tolerance or (precision == "f32" and not is_same.all()):
        raise DifferentError(
            f"{processor}, {attention}, {precision}: logits differ by more than {tolerance}, or "
            "greedy tokens"
        )


def compare_answers(python: EmulatedPython, processor: str, run: Sequence[str | Path]) -> None:
    """`edgeh2o run` in both places gives the same text, by sparse prefill."""
    expected = json.loads(run_here(["-m", "edgeh2o", *run]))
    result = python.run(processor, [python.site / "bin" / "edgeh2o", *run])
    actual = json.loads(checked(result, f"edgeh2o run on {processor}"))
    if actual["text"] != expected["text"]:
        raise DifferentError(f"{processor}: {actual['text']!r} is not {expected['text']!r}")
    pairs, pairs_dense = actual["pairs_computed"], actual["pairs_dense"]
    if pairs >= pairs_dense:
        raise DifferentError(f"{processor}: the prefill was not sparse: {pairs} pairs")
    print(
        f"{processor}: edgeh2o run gives the same text, {actual['generated_tokens']} tokens after "
        f"{actual['prompt_tokens']}, {pairs / pairs_dense:.0%} of the pairs: {actual['text']!r}",
        flush=True,
    )


def check_refusal(python: EmulatedPython, model: Path) -> None:
    """A kernel table that the processor lacks is refused by name."""
    command = [python.site / "bin" / "edgeh2o", "run", model, "-p", "the"]
    result = python.run("cortex-a72", command, EDGEH2O_ISA="neon_dotprod")
    message = "ISA 'neon_dotprod' is not available on this processor; available: scalar, neon"
    if result.returncode != 2 or message not in result.stderr:
        raise DifferentError(f"neon_dotprod on cortex-a72 was not refused: {result}")
    print(f"cortex-a72: {result.stderr.strip()}")


def check_gpu(python: EmulatedPython, model: Path) -> None:
    """The wheel has the kernels for GPUs that were made here, and says that there is no driver."""
    edgeh2o = python.site / "bin" / "edgeh2o"
    result = python.run("cortex-a76", [edgeh2o, "doctor", "--json"])
    gpu = json.loads(checked(result, "edgeh2o doctor"))["gpu"]
    targets = [image.split(" ")[0] for image in gpu["images"] or ()]
    # As setup.py provides them.
    expected = [name for name, major in TARGETS.items() if major in find_nvrtc()]
    if are_current(IMAGES):
        expected = json.loads((IMAGES / LIST_NAME).read_text())["images"]
    if sorted(targets) != sorted(expected) or NO_DRIVER not in gpu["why_none"]:
        raise DifferentError(f"doctor shows {gpu}, not images for {expected} and no driver")
    command = [edgeh2o, "run", model, "-p", "the", "--device", "cuda", "--quiet"]
    refused = python.run("cortex-a76", command)
    lines = refused.stderr.splitlines()
    if refused.returncode != 1 or len(lines) != 1 or NO_DRIVER not in lines[0]:
        raise DifferentError(f"--device cuda was not refused in a line: {refused}")
    print(f"images for {', '.join(targets) or 'no GPU'}; --device cuda: {lines[0]}")


def run_tests(python: EmulatedPython, processor: str, tests: Sequence[str], out: Path) -> None:
    """pytest on the installed package; the tests come from this repository."""
    command = ["-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider"]
    folders = [str(ROOT / test) for test in tests]
    paths = f"{python.site}{os.pathsep}{ROOT}"
    step = os.environ.get("EDGEH2O_TEST_STEP", "1")
    env = python.environment(PYTHONPATH=paths, EDGEH2O_TEST_STEP=step)
    result = subprocess.run(python.command(processor, [*command, *folders]), env=env, cwd=out)
    if result.returncode != 0:
        raise DifferentError(f"tests fail on {processor}")


def write_prompt(path: Path, n_words: int) -> Path:
    words = WORDS.split()
    path.write_text(" ".join(words[i * i % len(words)] for i in range(n_words)))
    return path


def check_wheel(python: EmulatedPython, arguments: argparse.Namespace, out: Path) -> None:
    prompt = write_prompt(out / "prompt.txt", arguments.words)
    models = {arguments.model: MODEL_TOLERANCE} if arguments.model else {}
    for tensor_type, tolerance in TOLERANCES.items() if not models else ():
        path = out / f"tiny-{tensor_type}.gguf"
        models[write_tiny_model(path, tensor_type=tensor_type, **MODEL)] = tolerance
    for processor in arguments.processor:
        for model, tolerance in models.items():
            print(model.name)
            for name in ATTENTION:
                probe: list[str | Path] = [PROBE, model, prompt, name]
                compare_logits(python, processor, [*probe, "f32"], out, tolerance)
            for precision in NARROW.get(processor, ()):
                probe = [PROBE, model, prompt, ATTENTION[0], precision]
                compare_logits(python, processor, probe, out, max(tolerance, NARROW_TOLERANCE))
            compare_answers(python, processor, ["run", model, "-f", prompt, *RUN_OPTIONS])
    check_refusal(python, next(iter(models)))
    check_gpu(python, next(iter(models)))


def check_quickly() -> int:
    """Builds a wheel of objects that are there, and opens it; the exit status."""
    missing = list(dict.fromkeys([*build_wheel_aarch64.find_missing(), *find_missing()]))
    if build_wheel_aarch64.find_sysroot() is None:
        missing.append("Debian's packages (python -m tools.build_wheel_aarch64 --fetch)")
    if missing:
        print(f"skipped: not there: {', '.join(missing)}", file=sys.stderr)
        return SKIPPED
    started = time.monotonic()

    def report(what: str) -> None:
        print(f"{what} ({time.monotonic() - started:.0f} s)", flush=True)

    out = BUILD / "quick"
    try:
        wheel = build_quick_wheel()
        report(f"built {wheel.name}")
        python = install_python(PYTHON, [str(wheel)], BUILD)
        report("installed")
        model = write_tiny_model(out / "tiny.gguf", tensor_type="F32", **MODEL)
        prompt = write_prompt(out / "prompt.txt", QUICK_WORDS)
        compare_answers(python, QUICK_PROCESSOR, ["run", model, "-f", prompt, *RUN_OPTIONS])
        check_gpu(python, model)
    except (BuildError, CheckFailedError, DifferentError, InstallError, PackageError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    report("passed")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, nargs="?", help="default: built for CPython 3.11")
    parser.add_argument("--processor", nargs="+", default=list(PROCESSORS), metavar="MODEL")
    parser.add_argument("--model", type=Path, help="a GGUF file instead of the tiny random ones")
    parser.add_argument("--words", type=int, default=N_WORDS, help="length of the prompt")
    parser.add_argument("--tests", nargs="+", default=[], help="test folders to run instead")
    parser.add_argument("--quick", action="store_true", help="a wheel of the cross check's objects")
    parser.add_argument("--build-dir", type=Path, default=BUILD)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        return check_quickly()
    if missing := find_missing():
        print(f"skipped: not installed: {', '.join(missing)}", file=sys.stderr)
        return SKIPPED
    if arguments.wheel is None:
        out = arguments.build_dir / "out"
        options = ["--python", "3.11", "--build-dir", str(arguments.build_dir), "--out", str(out)]
        if status := build_wheel_aarch64.main(options):
            return status
        (arguments.wheel,) = out.glob("*-cp311-*.whl")
    versions = {f"cp{version.replace('.', '')}": version for version in SUITES}
    version = versions[arguments.wheel.name.split("-")[2]]
    requirement = f"{arguments.wheel.resolve()}[test]" if arguments.tests else arguments.wheel
    out = arguments.build_dir.resolve() / f"run{version}"
    out.mkdir(parents=True, exist_ok=True)
    try:
        python = install_python(version, [str(requirement)], arguments.build_dir.resolve())
        if not arguments.tests:
            check_wheel(python, arguments, out)
        for processor in arguments.processor if arguments.tests else []:
            run_tests(python, processor, arguments.tests, out)
    except (DifferentError, InstallError, PackageError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

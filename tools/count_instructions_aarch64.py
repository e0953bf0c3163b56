"""Instructions and predicted cycles per multiply-accumulate on a Cortex-A76, against llama.cpp.

    python -m tools.count_instructions_aarch64 [--ggml DIR --ggml-headers DIR] [--isa neon_dotprod]

Nothing is timed: no such processor is needed. tools/instruction_counts computes the same matrix
products and attention by edgeh2o and by ggml (the library under llama.cpp) under qemu-user, whose
plugin interface says how often every block of instructions ran. Two runs of different length are
subtracted, so that only the operation itself is left, quantisation of activations included.

The cycles are PREDICTED, from documented limits: every block's throughput by llvm-mca with its
model of the Neoverse N1, the server core made from the Cortex-A76, which was written from Arm's
software optimisation guide (two 128-bit pipes, of which one converts, shifts and multiplies
integers; two loads or one store and one load a cycle), and at least a cycle per four instructions,
which is what the A76 decodes. Caches and memory are left out: a prediction for decode says how far
the instructions are from being the limit, not how fast memory is.

--ggml is a build folder of ggml's static libraries for the same processor:
    cmake -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DBUILD_SHARED_LIBS=OFF
      -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
      -DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cross_check_aarch64 import (
    COMPILER,
    EMULATOR,
    ROOT,
    SELFTEST,
    SKIPPED,
    CheckFailedError,
    Unit,
    compile_unit,
    read_units,
    run_compiler,
)

SOURCES = ROOT / "tools" / "instruction_counts"
PROCESSOR, CORE_MODEL = "cortex-a76", "neoverse-n1"
DECODE_WIDTH = 4
SHORT_RUN, LONG_RUN = 1, 3
# Blocks below this share of all executed instructions are not simulated: at most a few per cent.
SMALLEST_SHARE = 2e-4
# LLVM 17 and later have the model; earlier ones take that of another core without a word.
LLVM_VERSIONS = tuple(f"-{version}" for version in range(22, 16, -1))

Words = tuple[str, ...]
Blocks = Counter[Words]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one case takes per multiply-accumulate.

    Attributes:
        instructions: executed.
        cycles: predicted.
        dots: share of the instructions that are int8 dot products or float multiply-adds.
    """

    instructions: float
    cycles: float
    dots: float


def find_llvm(name: str) -> str | None:
    """Path of a program of LLVM, as Debian names them."""
    found = (shutil.which(name + version) for version in LLVM_VERSIONS)
    return next((path for path in found if path), None)


def build_plugin(build_dir: Path) -> Path:
    plugin = build_dir / "plugin.so"
    command = ["cc", "-shared", "-fPIC", "-O2", str(SOURCES / "plugin.c"), "-o", str(plugin)]
    run_compiler(command)
    return plugin


def build_edgeh2o(build_dir: Path) -> Path:
    units = [unit for unit in read_units() if not unit.source.startswith(SELFTEST)]
    core_flags = next(unit.flags for unit in units if unit.source.endswith("select.cc"))
    units.append(Unit(str((SOURCES / "edgeh2o.cc").relative_to(ROOT)), core_flags))
    objects = [str(compile_unit(unit, build_dir)) for unit in units]
    program = build_dir / "count_edgeh2o"
    run_compiler([COMPILER, "-static", "-fopenmp", *objects, "-o", str(program)])
    return program


def build_ggml(build_dir: Path, ggml: Path, headers: Path) -> Path:
    libraries = [
        str(next(ggml.rglob(f"lib{name}.a"))) for name in ("ggml", "ggml-cpu", "ggml-base")
    ]
    program = build_dir / "count_ggml"
    command = [COMPILER, "-std=c++17", "-O2", "-static", "-fopenmp", f"-I{headers}"]
    command += [str(SOURCES / "llama_cpp.cc"), *libraries, "-o", str(program)]
    run_compiler(command)
    return program


def run_counted(
    program: Path, plugin: Path, case: str, repetitions: int, isa: str | None
) -> tuple[Blocks, float]:
    """Executions of every block, by its instruction words, and multiply-accumulates of the case."""
    command = [EMULATOR, "-cpu", PROCESSOR, "-plugin", str(plugin), "-d", "plugin"]
    if isa:
        command += ["-E", f"EDGEH2O_ISA={isa}"]
    command += [str(program), case, str(repetitions)]
    result = subprocess.run(command, capture_output=True, text=True)
    macs = re.search(r"^macs (\d+)$", result.stdout, re.MULTILINE)
    if result.returncode != 0 or macs is None:
        raise CheckFailedError(f"{' '.join(command)}\n{result.stderr[-1000:]}")
    blocks: Blocks = Counter()
    for line in result.stderr.splitlines():
        kind, *fields = line.split(" ")
        if kind == "block":
            blocks[tuple(fields[2:])] += int(fields[0])
    return blocks, float(macs.group(1))


def disassemble(words: Iterable[str]) -> list[str]:
    """Assembly of instruction words, one line each; llvm-mca reads it."""
    text = "\n".join(" ".join(f"0x{word[i : i + 2]}" for i in (6, 4, 2, 0)) for word in words)
    command = [str(find_llvm("llvm-mc")), "--disassemble", "-triple=aarch64", f"-mcpu={CORE_MODEL}"]
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    lines = [line.strip().replace("\t", " ") for line in result.stdout.splitlines()]
    return [line for line in lines if line and not line.startswith(".")]


def predict_cycles(blocks: Sequence[Words], assembly: dict[str, str]) -> list[float]:
    """Cycles per execution of each block: of its busiest pipe in the core model, or of decoding."""
    regions = []
    for i, words in enumerate(blocks):
        body = "\n".join(assembly[word] for word in words)
        regions.append(f"# LLVM-MCA-BEGIN {i}\n{body}\n# LLVM-MCA-END {i}")
    command = [str(find_llvm("llvm-mca")), "-mtriple=aarch64", f"-mcpu={CORE_MODEL}"]
    command += ["-instruction-info=0", "-"]
    text = "\n".join(regions) + "\n"
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    rows = re.findall(r"Resource pressure per iteration:\n.*\n(.*)\n", result.stdout)
    if len(rows) != len(blocks):
        raise CheckFailedError(f"llvm-mca: {result.stderr[-1000:]}")
    busiest = [max(float(value) for value in row.split() if value != "-") for row in rows]
    return [
        max(limit, len(words) / DECODE_WIDTH) for limit, words in zip(busiest, blocks, strict=True)
    ]


def is_multiply_add(line: str) -> bool:
    return line.split(" ")[0] in (
        "sdot",
        "udot",
        "smmla",
        "fmla",
        "smlal",
        "smlal2",
        "smull",
        "smull2",
    )


def measure(program: Path, plugin: Path, case: str, isa: str | None) -> Cost:
    short, macs = run_counted(program, plugin, case, SHORT_RUN, isa)
    executed, _ = run_counted(program, plugin, case, LONG_RUN, isa)
    executed.subtract(short)
    total = sum(len(words) * count for words, count in executed.items())
    hot = [w for w, count in executed.items() if len(w) * count > SMALLEST_SHARE * total]
    distinct = sorted({word for words in hot for word in words})
    assembly = dict(zip(distinct, disassemble(distinct), strict=True))
    cycles = sum(
        limit * executed[words]
        for limit, words in zip(predict_cycles(hot, assembly), hot, strict=True)
    )
    n_hot = sum(len(words) * executed[words] for words in hot)
    dots = sum(
        executed[words] * sum(is_multiply_add(assembly[word]) for word in words) for words in hot
    )
    n_macs = macs * (LONG_RUN - SHORT_RUN)
    return Cost(total / n_macs, cycles * (total / n_hot) / n_macs, dots / n_hot)


def list_cases(program: Path) -> list[str]:
    result = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def print_table(programs: dict[str, Path], plugin: Path, isa: str | None) -> None:
    print(
        f"Per 1,000 multiply-accumulates on {PROCESSOR}: instructions executed, and cycles\n"
        f"PREDICTED from the issue limits of {CORE_MODEL} (llvm-mca) and {DECODE_WIDTH} "
        "instructions a cycle;\ndots: share of the instructions that multiply and add.\n"
    )
    print("| operation | program | instructions | dots | cycles, predicted | against edgeh2o |")
    print("|---|---|---:|---:|---:|---:|")
    cases = {name: list_cases(program) for name, program in programs.items()}
    for case in cases["edgeh2o"]:
        first = None
        for name, program in programs.items():
            if case not in cases[name]:
                continue
            cost = measure(program, plugin, case, isa)
            first = first or cost
            print(
                f"| {case} | {name} | {1000 * cost.instructions:.1f} | {cost.dots:.0%} | "
                f"{1000 * cost.cycles:.1f} | {cost.cycles / first.cycles:.2f} |",
                flush=True,
            )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "aarch64")
    parser.add_argument("--ggml", type=Path, help="build folder of ggml for the same processor")
    parser.add_argument("--ggml-headers", type=Path, help="its include folder")
    parser.add_argument("--isa", help="kernels of edgeh2o (default: its own choice)")
    arguments = parser.parse_args(argv)
    missing = [name for name in (COMPILER, EMULATOR, "cc") if not shutil.which(name)]
    if not find_llvm("llvm-mca"):
        missing.append("llvm-mca (Debian package llvm-19, or another from 17 on)")
    if missing:
        print(f"skipped: {', '.join(missing)} not installed", file=sys.stderr)
        return SKIPPED
    build_dir = arguments.build_dir.resolve()
    build_dir.mkdir(parents=True, exist_ok=True)
    try:
        plugin = build_plugin(build_dir)
        programs = {"edgeh2o": build_edgeh2o(build_dir)}
        if arguments.ggml and arguments.ggml_headers:
            headers = arguments.ggml_headers.resolve()
            programs["llama.cpp"] = build_ggml(build_dir, arguments.ggml.resolve(), headers)
        print_table(programs, plugin, arguments.isa)
    except CheckFailedError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the CUDA kernels by NVRTC: no CUDA installation, no device, no host compiler.

    python -m tools.build_cuda_images [--fetch] [--output FOLDER]

Writes kernels_sm_87.z (a cubin for Jetson Orin), kernels_sm_110.z (Jetson Thor),
kernels_compute_80.z (PTX for every later device, compiled by its driver) and images.json into the
package, where setup.py finds them. --fetch gets NVRTC and nvdisasm from PyPI into build/nvrtc; else
NVRTC is looked for in EDGEH2O_NVRTC (paths, separated by colons), there, beside this Python's
packages, and in /usr/local/cuda*. The code of a CUDA 13 has an ELF
ABI that drivers of JetPack 6 refuse: only a CUDA 12 serves Orin.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = "cuda/kernels/kernels.cu"  # below cpp/
IMAGES = ROOT / "edgeh2o" / "cuda" / "images"
FETCHED = ROOT / "build" / "nvrtc"
PACKAGES = (
    "nvidia-cuda-nvrtc-cu12==12.6.85",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-nvdisasm==13.5.37",
)
OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v")
# What is compiled, by which major version of CUDA.
TARGETS: Mapping[str, int] = {"sm_87": 12, "sm_110": 13, "compute_80": 12}
LIST_NAME = "images.json"
PACKAGE_BYTES = 3 * 2**20  # that all images may take


class CompileError(Exception):
    """NVRTC refused the kernels; the message is its log."""


@dataclass(frozen=True, slots=True)
class Image:
    """Code for one target, and what the compiler told of it."""

    target: str
    code: bytes
    log: str

    @property
    def file_name(self) -> str:
        return f"kernels_{self.target}.z"

    def resources(self) -> dict[str, tuple[int, int]]:
        """(registers, bytes that are spilled) of every kernel; empty for PTX."""
        found = {}
        for part in self.log.split("Compiling entry function ")[1:]:
            name = part.split("'")[1]
            registers = re.search(r"Used (\d+) registers", part)
            spills = [int(n) for n in re.findall(r"(\d+) bytes spill", part)]
            if registers:
                found[name] = (int(registers[1]), sum(spills))
        return found


class Nvrtc:
    """One NVRTC library. Raises OSError if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))  # NVRTC looks for it by name, not beside itself
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.path, self.version = path, (major.value, minor.value)

    def compile(self, target: str, source: Path = ROOT / "cpp" / KERNELS) -> Image:
        """The kernels for a target; build/nvrtc keeps what was compiled. Raises CompileError."""
        digest = hashlib.sha256(repr((OPTIONS, self.version, target)).encode())
        digest.update(source_digest().encode() + source.read_bytes())
        kept = FETCHED / "kept" / digest.hexdigest()[:16]
        try:
            log, _, code = zlib.decompress(kept.read_bytes()).partition(b"\0")
            return Image(target, code, log.decode())
        except (OSError, zlib.error):
            image = self._compile(target, source)
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_bytes(zlib.compress(image.log.encode() + b"\0" + image.code, 1))
            part.replace(kept)
        return image

    def _compile(self, target: str, source: Path) -> Image:
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        self._library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
        words = (f"--gpu-architecture={target}", f"-I{ROOT / 'cpp'}", *OPTIONS)
        options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        error = self._library.nvrtcCompileProgram(program, len(words), options)
        log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if error:
            raise CompileError(f"{target}: {log}")
        code = self._read(program, "CUBIN" if target.startswith("sm_") else "PTX")
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return Image(target, code, log)

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


def find_nvrtc() -> dict[int, Nvrtc]:
    """The newest usable library of every major version of CUDA, those named first."""
    found: dict[int, Nvrtc] = {}
    for path in _candidates():
        try:
            library = Nvrtc(path)
        except (OSError, AttributeError):
            continue
        found.setdefault(library.version[0], library)
    return found


def _candidates() -> Iterator[Path]:
    for name in os.environ.get("EDGEH2O_NVRTC", "").split(":"):
        if name:
            yield from (
                sorted(Path(name).glob("libnvrtc.so.*")) if Path(name).is_dir() else [Path(name)]
            )
    folders = [FETCHED, Path(sysconfig.get_path("purelib")) / "nvidia"]
    for folder in folders:
        yield from sorted(folder.rglob("libnvrtc.so.*"))
    for folder in sorted(Path("/usr/local").glob("cuda*"), reverse=True):
        yield from sorted(folder.glob("lib64/libnvrtc.so.*"))


def find_program(name: str) -> Path | None:
    """A program of the fetched packages, such as nvdisasm, or one on the path."""
    fetched = sorted(FETCHED.rglob(f"bin/{name}"))
    if fetched:
        return fetched[0]
    program = shutil.which(name)
    return None if program is None else Path(program)


def fetch() -> None:
    """Gets PACKAGES into build/nvrtc. Raises CalledProcessError where pip cannot."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
    for package in PACKAGES:  # both versions of NVRTC: a folder each
        folder = FETCHED / package.replace("==", "-")
        if not folder.is_dir():
            subprocess.run([*command, "--target", str(folder), package], check=True)
    for program in FETCHED.rglob("bin/*"):
        program.chmod(0o755)


def source_digest() -> str:
    """Of everything that the images are made from."""
    digest = hashlib.sha256(repr((OPTIONS, sorted(TARGETS))).encode())
    for path in sorted((ROOT / "cpp/cuda/kernels").iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def write_images(output: Path, libraries: Mapping[int, Nvrtc]) -> list[Image]:
    """Compiles every target that there is a library for, and writes what there is."""
    images = [
        libraries[major].compile(target) for target, major in TARGETS.items() if major in libraries
    ]
    output.mkdir(parents=True, exist_ok=True)
    for old in output.iterdir():
        old.unlink()
    for image in images:
        # Compressed: a cubin is an ELF file, which tools for wheels would take for a library.
        (output / image.file_name).write_bytes(zlib.compress(image.code, 9))
    made_by = {
        image.target: "NVRTC {}.{}".format(*libraries[TARGETS[image.target]].version)
        for image in images
    }
    report = {"sources": source_digest(), "images": made_by}
    (output / LIST_NAME).write_text(json.dumps(report, indent=2) + "\n", encoding="ascii")
    return images


def are_current(folder: Path) -> bool:
    """Whether the images in a folder were made of these sources."""
    try:
        report = json.loads((folder / LIST_NAME).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return bool(report.get("images")) and report.get("sources") == source_digest()


def provide_images(output: Path) -> str:
    """For setup.py: puts images into the package being built; says in a line what came of it."""
    if os.environ.get("EDGEH2O_CUDA") == "0":
        return "CUDA: left out (EDGEH2O_CUDA=0)"
    if are_current(IMAGES):
        if output != IMAGES:
            shutil.copytree(IMAGES, output, dirs_exist_ok=True)
        return f"CUDA: images of {IMAGES.relative_to(ROOT)}"
    try:
        libraries = find_nvrtc()
        if not libraries:
            return (
                "CUDA: left out, no NVRTC was found; python -m tools.build_cuda_images --fetch "
                "gets it"
            )
        images = write_images(output, libraries)
    except CompileError as error:
        return f"CUDA: left out, the kernels do not compile: {error}"
    return "CUDA: images for " + ", ".join(image.target for image in images)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code, 1 without NVRTC."""
    parser = argparse.ArgumentParser(
        prog="build_cuda_images", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--fetch", action="store_true", help="get NVRTC and nvdisasm from PyPI")
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder of the images")
    options = parser.parse_args(arguments)
    if options.fetch:
        try:
            fetch()
        except subprocess.CalledProcessError:
            print("NVRTC cannot be fetched; the error of pip is above", file=sys.stderr)
            return 1
    libraries = find_nvrtc()
    if not libraries:
        print("no NVRTC was found; --fetch gets it from PyPI", file=sys.stderr)
        return 1
    for image in write_images(options.output, libraries):
        registers = [n for n, _ in image.resources().values()]
        most = f", at most {max(registers)} registers" if registers else ""
        size = (options.output / image.file_name).stat().st_size
        print(f"{image.file_name}: {len(image.code)} bytes, {size} compressed{most}")
    for target in TARGETS:
        if TARGETS[target] not in libraries:
            print(f"{target}: left out, it needs an NVRTC of CUDA {TARGETS[target]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

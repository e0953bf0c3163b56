"""Extension modules and the table of instruction sets; everything else is in pyproject.toml."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

import pybind11
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a build backend does not
from tools import build_on_macos
from tools.build_cuda_images import provide_images

if sys.platform in ("win32", "cygwin"):
    sys.exit(
        "edgeh2o does not run on Windows itself: install it in Ubuntu under WSL 2 (wsl --install), "
        "as on Linux"
    )

# The target machine, which differs from this one when cross-compiling.
host = os.environ.get("_PYTHON_HOST_PLATFORM", sysconfig.get_platform())
is_macos = host.startswith("macosx-")
openmp_flags, openmp_link_flags = ["-fopenmp"], ["-fopenmp"]
if is_macos:
    try:
        host = build_on_macos.choose_platform(host)
        libomp = build_on_macos.find_libomp(host.rpartition("-")[2])
    except build_on_macos.MacError as error:
        sys.exit(str(error))
    openmp_flags, openmp_link_flags = build_on_macos.openmp_flags(libomp)
target = host.rpartition("-")[2]
target = {"amd64": "x86_64", "arm64": "aarch64"}.get(target.lower(), target) or platform.machine()

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# 16 registers: without these, gcc 12 gathers the products of several steps and spills them.
FEW_REGISTERS = ["-fno-tree-reassoc", "-fno-tree-ter"]
AVX512 = [*AVX2, *(f"-mavx512{feature}" for feature in ("f", "bw", "dq", "vl", "vnni"))]
# gcc 12 warns of its own avx512 header.
GCC_HEADER_WARNINGS = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
# gcc 12's first scheduling pass makes tiles of widening multiplies spill, others copy accumulators.
IN_ORDER = ["-fno-schedule-insns"]
# gcc's: without it checks of addresses are no calls, and compile for many minutes.
FEW_CHECKS = ["--param=asan-instrumentation-with-call-threshold=0"]
# gcc's: with it the ends of tiles are copied for every number of rows, a sixth of the compile.
FEW_PATHS = ["-fno-thread-jumps"]
# What other compilers may not know, and can do without.
OPTIONAL = {*FEW_PATHS, *FEW_REGISTERS, *GCC_HEADER_WARNINGS, *IN_ORDER, *FEW_CHECKS}
ISA_FLAGS = {
    "x86_64": {
        "avx2": [*AVX2, *FEW_REGISTERS],
        "avxvnni": [*AVX2, *FEW_REGISTERS, "-mavxvnni"],
        "avx512vnni": [*AVX512, *GCC_HEADER_WARNINGS],
        "avx512bf16": [*AVX512, "-mavx512bf16", *GCC_HEADER_WARNINGS],
    },
    "aarch64": {
        "neon": ["-march=armv8-a", *IN_ORDER],
        "neon_dotprod": ["-march=armv8.2-a+dotprod+fp16", *IN_ORDER],
        "neon_i8mm": ["-march=armv8.2-a+dotprod+fp16+i8mm+bf16", *IN_ORDER],
    },
}.get(target, {})

# An ISA that is another one and products of bf16 is compiled for those alone.
BF16_ADDED_TO = {"avx512bf16": "avx512vnni"}

chosen = os.environ.get("EDGEH2O_ISAS")  # for example "avx2": a quick build for one machine
if chosen is not None:
    if unknown := {*filter(None, chosen.split(","))} - {*ISA_FLAGS}:
        known = ", ".join(ISA_FLAGS) or "none"
        sys.exit(f"EDGEH2O_ISAS: {', '.join(sorted(unknown))} is not among {known} of {target}")
    wanted = {*chosen.split(",")}
    wanted |= {BF16_ADDED_TO[isa] for isa in wanted & {*BF16_ADDED_TO}}
    ISA_FLAGS = {isa: flags for isa, flags in ISA_FLAGS.items() if isa in wanted}

debug = os.environ.get("EDGEH2O_DEBUG") == "1"
sanitizers = os.environ.get("EDGEH2O_SANITIZE", "")  # for example "address,undefined"
base_flags = [
    "-std=c++17",
    "-fvisibility=hidden",
    *openmp_flags,
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
]
release_flags = [*base_flags, "-O2", "-g0", "-DNDEBUG"]
if debug:
    # Bindings compile in half the time; -g takes another sixth.
    base_flags += ["-O0", "-g1", "-UNDEBUG", "-DEH2O_DEBUG"]
elif sanitizers:
    base_flags += ["-O1", "-g1", "-DNDEBUG", "-fno-omit-frame-pointer"]
else:
    base_flags = release_flags
# Bindings hold no algorithms, and compile in four fifths of the time.
binding_flags = [] if debug or sanitizers else ["-O1"]
kernel_flags = [flag for flag in base_flags if flag not in openmp_flags]
if not sanitizers:
    kernel_flags += ["-O1", "-g1"] if debug else ["-O3", *FEW_PATHS]  # -O2 takes twice as long
# A finding ends the process.
sanitizer_flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", *FEW_CHECKS]
# Kernels are all inlined: with checks of undefined behaviour too they compile for many minutes.
kernel_sanitizer_flags = [*sanitizer_flags, "-fno-sanitize=undefined"]
if not sanitizers:
    sanitizer_flags = kernel_sanitizer_flags = []

headers = glob("cpp/**/*.h", recursive=True)
parts = glob("cpp/**/*.cc", recursive=True)  # of the files that are compiled


def joined(
    name: str, sources: list[str], n_files: int = 1, *, is_one_object: bool = False
) -> list[str]:
    """Files that include the sources: headers are read and templates made once for many of them.

    114 files take 149 core-seconds alone and 68 joined. With sanitizers, which are for those who
    change them, they are compiled one by one: each has to include what it needs.
    """
    sources = sorted(sources)
    if sanitizers and not is_one_object:
        return sources
    paths = []
    for i in range(n_files):
        lines = [f'#include "../../{path}"\n' for path in sources[i::n_files]]
        text, path = "".join(lines), Path("build/joined", f"{name}_{i}.cc")
        if not path.exists() or path.read_text("ascii") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")  # builds may run side by side
            part.write_text(text, "ascii")
            part.replace(path)
        paths.append(str(path))
    return paths


core_sources = [
    *joined("base", glob("cpp/base/*.cc") + glob("cpp/quant/*.cc")),
    *joined("ops", glob("cpp/ops/*.cc")),
    # An archive would drop the object of a policy, which registers itself and is named by nothing.
    *joined("sparse", glob("cpp/sparse/*.cc"), is_one_object=True),
    *joined("sequence", glob("cpp/sequence/*.cc")),
    *joined("model", glob("cpp/model/*.cc")),
    *joined("layers", glob("cpp/model/*/*.cc")),
    *joined("cuda", glob("cpp/cuda/*.cc")),
    "cpp/isa/select.cc",
]


def static_library(name: str, sources: list[str], flags: list[str]) -> tuple[str, dict]:
    build_info = {"sources": sources, "include_dirs": ["cpp"], "cflags": flags}
    build_info["obj_deps"] = {"": headers + parts}
    return name, build_info


table_entries = (
    f"BF16({isa},{BF16_ADDED_TO[isa]})" if isa in BF16_ADDED_TO else f"X({isa})"
    for isa in ISA_FLAGS
)
isas = f"-DEH2O_ISAS={' '.join(table_entries)}"
libraries = [static_library("edgeh2o_core", core_sources, [*base_flags, isas, *sanitizer_flags])]
libraries += [
    static_library(
        f"edgeh2o_{isa}", [f"cpp/isa/{isa}.cc"], kernel_flags + flags + kernel_sanitizer_flags
    )
    for isa, flags in {"scalar": [] if debug else ["-O2"], **ISA_FLAGS}.items()
]


def pybind11_headers() -> str:
    """A copy of its headers. ccache knows files by their paths, and each isolated build of pip has
    another folder: with this a wheel after an install takes 17 core-seconds instead of 88."""
    copy = Path("build", f"pybind11-{pybind11.__version__}")
    if not copy.exists():
        part = copy.with_suffix(f".{os.getpid()}")  # builds may run side by side
        shutil.copytree(pybind11.get_include(), part)
        try:
            part.rename(copy)
        except OSError:  # another build was sooner
            shutil.rmtree(part)
    return str(copy)


# Elsewhere than on a Mac, where these are defaults, or symbols hidden by the flags above.
linux_link_flags = [] if is_macos else ["-Wl,--exclude-libs,ALL", "-ldl"]
# Static libraries are searched once, in order: the core before the kernel tables it refers to.
link = {
    "libraries": [name for name, _ in libraries],
    "include_dirs": ["cpp", pybind11_headers()],
    "extra_compile_args": base_flags + sanitizer_flags,
    "extra_link_args": [*openmp_link_flags, *linux_link_flags, *sanitizer_flags],
    "language": "c++",
    # The archives are relinked when any of their sources is newer.
    "depends": headers + parts + [path for _, info in libraries for path in info["sources"]],
}
extensions = [Extension("edgeh2o._core", joined("bindings", glob("cpp/bindings/*.cc"), 3), **link)]
# Without the core: in a debug build as in others, so that ccache has them.
alone = {
    "extra_compile_args": (release_flags if debug else base_flags) + sanitizer_flags,
    "extra_link_args": sanitizer_flags,
    "language": "c++",
}
cython_extensions = [
    Extension(module, [module.replace(".", "/") + ".pyx"], **settings)
    for module, settings in (
        ("edgeh2o._kernels", link),
        ("edgeh2o._recurrent_kernels", link),
        ("edgeh2o.engine._ngrams", alone),
        ("edgeh2o.engine._recent_tokens", alone),
        ("edgeh2o.engine._sampler", alone),
        ("edgeh2o.tokenizer._bpe", alone),
        ("edgeh2o.tokenizer._spm", alone),
        ("edgeh2o.tokenizer._unigram", alone),
    )
]

n_jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


slots = ThreadPoolExecutor(n_jobs)


@cache
def is_known(compiler: tuple[str, ...], flag: str) -> bool:
    """Whether a compiler takes a flag without a word."""
    empty = ["-Werror", flag, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run([*compiler, *empty], capture_output=True, check=False).returncode == 0


def is_binding(source: str) -> bool:
    """Whether a file has nothing but calls of the core."""
    return "/bindings" in source or source.startswith(("edgeh2o/_kern", "edgeh2o/_recur"))


def share_slots(compiler: Any) -> None:
    """Lets ``compiler`` compile a file per usable core, whatever the number of callers."""

    def compile_all(
        sources: list[str],
        output_dir: str | None = None,
        macros: Any = None,
        include_dirs: list[str] | None = None,
        debug: bool = False,
        extra_preargs: list[str] | None = None,
        extra_postargs: list[str] | None = None,
        depends: list[str] | None = None,
    ) -> list[str]:
        # The steps of CCompiler.compile, as pybind11's ParallelCompile has them too.
        _, objects, flags, pp_opts, build = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)
        command = tuple(getattr(compiler, "compiler_so_cxx", compiler.compiler_so))
        flags = [flag for flag in flags if flag not in OPTIONAL or is_known(command, flag)]
        todo = [item for item in objects if item in build]
        jobs = []
        for item in todo:
            own = binding_flags if is_binding(build[item][0]) else []
            args = (cc_args, [*flags, *own], pp_opts)
            jobs.append(slots.submit(compiler._compile, item, *build[item], *args))
        for job in jobs:
            job.result()
        return objects

    compiler.compile = compile_all


class BuildLibraries(build_clib):
    """Compiles the libraries side by side."""

    def build_libraries(self, libraries: list[tuple[str, dict]]) -> None:
        share_slots(self.compiler)
        # They are written in a moment. ar would leave in them what is no longer a part.
        for name, _ in self.libraries:
            Path(self.build_clib, self.compiler.library_filename(name)).unlink(missing_ok=True)
        build = super().build_libraries
        with ThreadPoolExecutor(len(libraries)) as pool:  # the kernels, which take longest, first
            list(pool.map(lambda library: build([library]), reversed(libraries)))


class BuildExtensions(build_ext):
    """Compiles the files of an extension side by side."""

    def build_extensions(self) -> None:
        share_slots(self.compiler)
        # Each names the libraries that it needs: others would take from them what they have of the
        # standard library, and with it the whole object.
        self.compiler.set_libraries([])
        super().build_extensions()


class BuildPackage(build_py):
    """Adds the images of the CUDA kernels, where there is a compiler for them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # else the sources are the package, with what is in them
            print(provide_images(Path(self.build_lib) / "edgeh2o/cuda/images"))


build_base = "build/debug_base" if debug else "build"
if sanitizers:
    build_base = "build/sanitize_base"

setup(
    # Objects of one kind of build must not be taken for those of another.
    options={
        "build": {"build_base": build_base},
        "build_ext": {"parallel": 1 + len(cython_extensions)},  # which wait for slots
    },
    cmdclass={
        "build_clib": BuildLibraries,
        "build_ext": BuildExtensions,
        "build_py": BuildPackage,
    },
    libraries=libraries,
    ext_modules=extensions + cythonize(cython_extensions, language_level=3),
)

"""An aarch64 wheel of the objects that the cross check has compiled, for a look at it in CI.

It differs from one of tools.build_wheel_aarch64 in that everything is optimised less: the sources,
the sysroot, the files of the package, and what is grafted, tagged and checked at the end are the
same.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools import build_wheel_aarch64, cross_check_aarch64
from tools.build_wheel_aarch64 import BUILD, PYTHON, TRIPLET, BuildError, run
from tools.cross_check_aarch64 import ROOT, Unit

# As of a debug build, but quicker to compile.
QUICK = ("-O0",)


def archive(name: str, objects: Iterable[Path], folder: Path) -> Path:
    """A static library of objects, from which linkers take what they need."""
    path = folder / f"lib{name}.a"
    path.unlink(missing_ok=True)
    run([f"{TRIPLET}-ar", "rcs", path, *objects])
    return path


def cython_source(source: str, folder: Path) -> str:
    """The C++ file of a Cython file, relative to the repository; builds leave it beside that."""
    beside, output = ROOT / Path(source).with_suffix(".cpp"), folder / f"{Path(source).stem}.cpp"
    if cross_check_aarch64.is_current(beside, [ROOT / source]):
        return str(beside.relative_to(ROOT))
    if not cross_check_aarch64.is_current(output, [ROOT / source]):
        folder.mkdir(parents=True, exist_ok=True)
        run([sys.executable, "-m", "cython", "--cplus", "-3", "-o", output, source])
    return str(output.relative_to(ROOT))


def unit_of(source: str, flags: tuple[str, ...], generated: Path) -> Unit:
    """A source of an extension module."""
    is_cython = source.endswith(".pyx")
    return Unit(cython_source(source, generated) if is_cython else source, (*flags, *QUICK))


def build_modules(headers: Sequence[Path], generated: Path, package: Path) -> None:
    """Compiles the extension modules of setup.py and puts them into a package."""
    setup = cross_check_aarch64.read_setup()
    toolchain = cross_check_aarch64.find_toolchain(is_quick=True)
    folder = cross_check_aarch64.QUICK_BUILD
    units: dict[str, list[Unit]] = {}
    for module in setup.modules:
        includes = [f"-I{path}" for path in (*headers, *module["include_dirs"])]
        flags = (*module["extra_compile_args"], *includes)
        units[module["name"]] = [unit_of(source, flags, generated) for source in module["sources"]]
    every = [unit for some in (*setup.libraries.values(), *units.values()) for unit in some]
    objects = dict(
        zip(every, cross_check_aarch64.compile_units(every, folder, toolchain), strict=True)
    )
    # The core before the kernel tables that it refers to.
    archives = [
        archive(name, [objects[unit] for unit in some], folder)
        for name, some in setup.libraries.items()
    ]
    for module in setup.modules:
        name = module["name"]
        target = package.joinpath(*name.split(".")[:-1])
        target.mkdir(parents=True, exist_ok=True)
        output = target / (name.rpartition(".")[2] + build_wheel_aarch64.module_suffix(PYTHON))
        parts = [*(objects[unit] for unit in units[name]), *archives]
        cross_check_aarch64.link(parts, output, toolchain, "-shared", *module["extra_link_args"])


def build_quick_wheel(build_dir: Path = BUILD) -> Path:
    """The wheel for CPython of PYTHON, grafted and checked; needs what --fetch gets.

    Raises:
        BuildError, CheckFailedError: if a step fails.
    """
    sysroot = build_wheel_aarch64.find_sysroot(build_dir)
    if sysroot is None:
        raise BuildError("the sysroot was not fetched: python -m tools.build_wheel_aarch64 --fetch")
    headers = build_wheel_aarch64.debian_headers(PYTHON, build_dir)
    package, built = build_dir / "quick/lib", build_dir / "quick/linux"
    for folder in (package, built):
        shutil.rmtree(folder, ignore_errors=True)
    build_modules(headers, build_dir / "quick/cython", package)
    settings = build_dir / "quick/setup.cfg"
    settings.write_text(f"[build]\nbuild_lib = {package}\n[egg_info]\negg_base = {build_dir}\n")
    command = [sys.executable, "setup.py", "-q", "build_py", "bdist_wheel", "--skip-build"]
    command += [f"--bdist-dir={build_dir / 'quick/bdist'}", f"--dist-dir={built}"]
    run(command, env={"DIST_EXTRA_CONFIG": str(settings), "_PYTHON_HOST_PLATFORM": "linux-aarch64"})
    wheel = build_wheel_aarch64.retag(PYTHON, built)
    return build_wheel_aarch64.finish_wheel(wheel, sysroot, build_dir / "quick/out")

"""Checks that imports and includes go only down the layer ladder, and never in a circle.

    python -m tools.check_layers [ROOT]

Python: a module of edgeh2o may import its own folder and lower layers (PYTHON_LAYERS), and nothing
of tests/, tools/ and bench/. Nobody imports a file of tests (test_*.py), only tests a conftest.py,
and bench/ nothing of tests/; what tools/ and several tests share are modules beside these.
C++: a file in cpp/ may include its own folder and folders above it in CPP_FOLDERS;
sparse/ reads base/ alone, and what is compiled once per ISA takes no header that brings
functions from outside its namespace. OpenMP pragmas stay in base/parallel.
Within a folder no chain of imports or includes may lead back to where it began, nor one through
tests/, tools/ and bench/. Imports inside functions and for type checkers count as well: two modules
that know each other are one module in two files, whenever they load each other.

Prints path:line of each violation; the exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Highest first. Modules of one layer do not import each other.
PYTHON_LAYERS = (
    ("__main__",),
    ("cli",),
    ("__init__", "memory"),
    ("evaluation", "serving"),
    ("llm",),
    ("engine", "export"),
    ("onnx",),
    ("runners", "host"),
    ("models", "tokenizer", "attention", "isa", "cuda"),
    ("formats",),
    ("config", "model_config", "_core", "_kernels", "_recurrent_kernels", "_version"),
    ("layer_config", "rope_config", "lora_config", "sampling_config", "_kernel_table"),
    ("option_fields", "sampler_names"),
    ("errors",),
)
# Beside the package, and not installed with it.
OTHER_FOLDERS = ("tests", "tools", "bench")
# Lowest first, as the source tree lists them.
CPP_FOLDERS = (
    "base",
    "quant",
    "simd",
    "kernels",
    "isa",
    "sparse",
    "ops",
    "sequence",
    "model",
    "cuda",
    "bindings",
)
ALLOWED_FOLDERS = {
    folder: frozenset(CPP_FOLDERS[: rank + 1]) for rank, folder in enumerate(CPP_FOLDERS)
} | {"sparse": frozenset({"base", "sparse"})}
# Kernels of GPUs: cpp/cuda/kernels.
CUDA_SUFFIXES = (".cu", ".cuh")
# Types and constants only: no function that the linker could take from the wrong ISA.
KERNEL_INTERFACES = frozenset({"quant/packed_format.h"})
KERNEL_SYSTEM_HEADERS = frozenset({"cstddef", "cstdint"})
CYTHON_SUFFIXES = (".pyx", ".pxd")
CPP_SUFFIXES = (".h", ".cc", ".cpp", *CUDA_SUFFIXES)

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
OMP_PRAGMA = re.compile(r"^\s*#\s*pragma\s+omp\b|\b_Pragma\s*\(\s*\"omp\b")
CYTHON_IMPORT = re.compile(r"^\s*(?:from\s+(\.*[\w.]*)\s+c?import\s+(\w+)|c?import\s+([\w.]+))")


# Of each module or header the others of its folder that it reads, and where it says so.
Links = dict[Path, dict[Path, tuple[Path, int]]]


@dataclass(frozen=True, slots=True)
class Violation:
    """A line that breaks the ladder."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_python(root: Path) -> list[Violation]:
    """Violations in the package root/edgeh2o, those of Cython too."""
    package = root / "edgeh2o"
    ranks = {name: rank for rank, layer in enumerate(PYTHON_LAYERS) for name in layer}
    violations = []
    links: Links = {}
    for path in sorted(package.rglob("*.p*")):
        if path.suffix not in (".py", ".pyi", *CYTHON_SUFFIXES):
            continue
        module = path.relative_to(package).parent / path.name.split(".")[0]
        own = module.parts[0]
        if own not in ranks:
            violations.append(Violation(path, 1, f"{own} has no place in the ladder"))
            continue
        for line, folder, imported in _imports(path, root):
            if folder != package.name:
                violations.append(Violation(path, line, f"edgeh2o must not import {folder}"))
                continue
            target = imported.parts[0]
            if target == own:
                if imported != module:
                    links.setdefault(module, {}).setdefault(imported, (path, line))
            elif target not in ranks:
                violations.append(Violation(path, line, f"{target} has no place in the ladder"))
            elif ranks[target] <= ranks[own]:
                violations.append(Violation(path, line, f"{own} must not import {target}"))
    return violations + _find_circles(links)


def check_others(root: Path) -> list[Violation]:
    """Violations in the Python files of root/tests, root/tools and root/bench."""
    violations = []
    links: Links = {}
    for own in OTHER_FOLDERS:
        for path in sorted((root / own).rglob("*.py")):
            module = path.relative_to(root).with_suffix("")
            for line, folder, imported in _imports(path, root):
                if folder not in OTHER_FOLDERS:
                    continue
                target = Path(folder, imported)
                is_shared = not target.name.startswith("test_")
                if target.name == "conftest":
                    is_shared = own == "tests"
                if own == "bench" and folder == "tests":
                    violations.append(Violation(path, line, "bench must not import tests"))
                elif not is_shared:
                    message = f"{own} must not import the tests of {target.as_posix()}"
                    violations.append(Violation(path, line, message))
                elif target != module:
                    links.setdefault(module, {}).setdefault(target, (path, line))
    return violations + _find_circles(links)


def _find_circles(links: Links) -> list[Violation]:
    """One violation for each circle that a depth-first walk closes, where it closes it."""
    violations = []
    done: set[Path] = set()

    def walk(trail: list[Path]) -> None:
        for target, (path, line) in sorted(links.get(trail[-1], {}).items()):
            if target in trail:
                circle = [*trail[trail.index(target) :], target]
                text = " > ".join(each.as_posix() for each in circle)
                violations.append(Violation(path, line, f"a circle: {text}"))
            elif target not in done:
                walk([*trail, target])
        done.add(trail[-1])

    for start in sorted(links):
        if start not in done:
            walk([start])
    return violations


def _imports(path: Path, root: Path) -> Iterator[tuple[int, str, Path]]:
    """(line, folder of root, module below it, without suffix) of every import of this project."""
    found = _cython_imports(path) if path.suffix in CYTHON_SUFFIXES else _ast_imports(path)
    # The package that contains the file: a relative import of level 1 starts there.
    containing = path.relative_to(root).parts[:-1]
    for line, level, module, name in found:
        parts = tuple(module.split(".")) if module else ()
        if level:
            parts = containing[: len(containing) - level + 1] + parts
        if not parts or parts[0] not in ("edgeh2o", *OTHER_FOLDERS):
            continue
        folder = root / parts[0]
        place = folder.joinpath(*parts[1:])
        if name and ((place / name).is_dir() or any(place.glob(f"{name}.*"))):
            place /= name
        if place.is_dir():
            place /= "__init__"
        yield line, folder.name, place.relative_to(folder)


def _ast_imports(path: Path) -> Iterator[tuple[int, int, str, str | None]]:
    """(line, level, module, imported name), imports inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, 0, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, node.level, node.module or "", alias.name


def _cython_imports(path: Path) -> Iterator[tuple[int, int, str, str | None]]:
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = CYTHON_IMPORT.match(text)
        if match is None:
            continue
        source, name, module = match.groups()
        if source is None:
            yield line, 0, module, None
        else:
            level = len(source) - len(source.lstrip("."))
            yield line, level, source[level:], name


def check_cpp(root: Path) -> list[Violation]:
    """Violations in the sources of root/cpp."""
    cpp = root / "cpp"
    violations = []
    links: Links = {}
    for path in sorted(cpp.rglob("*")):
        if path.suffix not in CPP_SUFFIXES:
            continue
        relative = path.relative_to(cpp)
        folder = relative.parts[0]
        if folder not in ALLOWED_FOLDERS:
            violations.append(Violation(path, 1, f"{folder} has no place in the ladder"))
            continue
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if OMP_PRAGMA.search(text) and relative.parts[:2] not in (
                ("base", "parallel.h"),
                ("base", "parallel.cc"),
            ):
                violations.append(Violation(path, line, "OpenMP belongs in base/parallel"))
            match = INCLUDE.match(text)
            if match is None:
                continue
            message = _include_error(path, cpp, header=match[2], is_system=match[1] == "<")
            if message is not None:
                violations.append(Violation(path, line, message))
            target = _own_header(path, cpp, match[2])
            if target is not None and target.split("/")[0] == folder:
                links.setdefault(relative, {}).setdefault(Path(target), (path, line))
    return violations + _find_circles(links)


def _include_error(path: Path, cpp: Path, *, header: str, is_system: bool) -> str | None:
    folder = path.relative_to(cpp).parts[0]
    target = _own_header(path, cpp, header)
    is_kernel = folder == "kernels"
    if target is None:
        if is_kernel and not (is_system and header in KERNEL_SYSTEM_HEADERS):
            return f"a kernel must not include {header}"
        if not is_system:
            return f"{header} is not a header of this project"
        return None
    target_folder = target.split("/")[0]
    if is_kernel and target_folder not in ("kernels", "simd") and target not in KERNEL_INTERFACES:
        return f"a kernel must not include {target}"
    if target_folder == "cuda" and path.suffix in CUDA_SUFFIXES:
        return None
    if target_folder not in ALLOWED_FOLDERS[folder]:
        return f"{folder} must not include {target}"
    return None


def _own_header(path: Path, cpp: Path, header: str) -> str | None:
    """The header's path below cpp/, or None if it belongs to somebody else."""
    for candidate in (cpp / header, path.parent / header):
        resolved = candidate.resolve()
        if resolved.is_file() and resolved.is_relative_to(cpp.resolve()):
            return resolved.relative_to(cpp.resolve()).as_posix()
    return header if header.split("/")[0] in CPP_FOLDERS else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="check_layers", description=__doc__.split("\n")[0])
    repository = Path(__file__).resolve().parent.parent
    parser.add_argument("root", nargs="?", type=Path, default=repository, help="source tree")
    root = parser.parse_args(arguments).root
    violations = check_python(root) + check_others(root) + check_cpp(root)
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Checks that what is compiled for one ISA exports nothing outside that ISA's namespace.

    python -m tools.check_isa_symbols build/libedgeh2o_avx2.a build/libedgeh2o_neon.a ...

The linker keeps one copy of an inline function. If an object compiled with AVX-512 flags
exports, say, an instantiation of std::max, that copy may serve the whole module and fault
on a machine without AVX-512. So every global or weak symbol that an ISA's object file or
static library defines must lie inside edgeh2o::<isa>.

Prints file and symbol of each violation; the exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ISA_DEFINITION = re.compile(r"^\s*#\s*define\s+EH2O_ISA\s+(\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A defined symbol as nm lists it; `name` is mangled."""

    kind: str
    name: str


def known_isas(isa_folder: Path) -> list[str]:
    """Names of the ISA namespaces that the sources of cpp/isa define, longest first."""
    names = {
        name
        for path in isa_folder.glob("*.cc")
        for name in ISA_DEFINITION.findall(path.read_text(encoding="utf-8"))
    }
    return sorted(names, key=lambda name: (-len(name), name))


def isa_of(path: Path, isas: Sequence[str]) -> str | None:
    """The ISA that a file is named for, or None; "neon_i8mm" wins over "neon"."""
    for isa in isas:
        if re.search(rf"(?<![a-z0-9]){isa}(?![a-z0-9])", path.stem):
            return isa
    return None


def list_symbols(path: Path, *, nm: str = "nm") -> list[Symbol]:
    """Global and weak symbols that an object file or archive defines.

    Raises:
        subprocess.CalledProcessError: if nm cannot read the file.
        FileNotFoundError: if nm does not exist.
    """
    listing = subprocess.run(
        [nm, "--defined-only", "--extern-only", str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    fields = (line.split() for line in listing.splitlines())
    return [Symbol(row[1], row[2]) for row in fields if len(row) == 3]


def strays(symbols: Iterable[Symbol], isa: str) -> list[Symbol]:
    """The symbols that lie outside edgeh2o::<isa>."""
    # Itanium mangling: _Z, special prefixes (vtable, guard, local entity), N, qualifiers,
    # then the namespaces, each with its length.
    inside = re.compile(rf"_Z[A-Z]*N[rVKRO]*7edgeh2o{len(isa)}{isa}")
    return [symbol for symbol in symbols if not inside.match(symbol.name)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code: 2 if a file cannot be checked."""
    parser = argparse.ArgumentParser(prog="check_isa_symbols", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="object files or static libraries")
    parser.add_argument("--nm", default="nm", help="nm of the target, e.g. aarch64-linux-gnu-nm")
    options = parser.parse_args(arguments)
    isas = known_isas(REPOSITORY / "cpp" / "isa")
    is_clean = True
    for path in options.files:
        isa = isa_of(path, isas)
        if isa is None:
            print(f"{path}: named for none of {', '.join(isas)}", file=sys.stderr)
            return 2
        try:
            symbols = list_symbols(path, nm=options.nm)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{path}: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
            return 2
        if not symbols:
            print(f"{path}: defines no symbol", file=sys.stderr)
            return 2
        for symbol in strays(symbols, isa):
            is_clean = False
            print(f"{path}: {symbol.kind} {symbol.name} is outside edgeh2o::{isa}")
    return 0 if is_clean else 1


if __name__ == "__main__":
    raise SystemExit(main())

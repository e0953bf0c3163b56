"""The command line of tools that record what llama.cpp makes of tiny models, a file a case."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from bench.errors import LlamaCppError
from bench.llama_cpp import LlamaCpp

Record = Callable[[LlamaCpp, str, Path], None]


def record_cases(
    arguments: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    cases: Collection[str],
    folder: Path,
    record: Record,
) -> int:
    """Records the cases that are named, or all, by ``record(llama_cpp, case, folder)``.

    ``versions.json`` of the folder says which llama.cpp made each. Returns the exit code.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("cases", nargs="*", help="default: all", metavar="CASE")
    options = parser.parse_args(arguments)
    unknown = set(options.cases) - set(cases)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    llama_cpp = LlamaCpp(options.llama_cpp, threads=2)
    folder.mkdir(exist_ok=True)
    versions_file = folder / "versions.json"
    versions = json.loads(versions_file.read_text()) if versions_file.is_file() else {}
    try:
        version = llama_cpp.version()
        for case in options.cases or cases:
            record(llama_cpp, case, folder)
            versions[case] = version
    except (OSError, LlamaCppError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    versions_file.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")
    return 0

"""Gets the NVIDIA driver's library, for tests of what happens where there is no GPU.

    python -m tools.fetch_libcuda

The package libcuda1 of Debian's non-free part is unpacked into build/libcuda, and the path of its
libcuda.so.1 printed. Nothing is installed, and nothing of it goes into a wheel.

Exit status: 0 it is there, 1 failed, 77 skipped because a tool is missing (stderr names it).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tools.aarch64_packages import PackageError, apt_options, run

FOLDER = Path(__file__).resolve().parent.parent / "build" / "libcuda"
SUITE, COMPONENT, PACKAGE, LIBRARY = "bookworm", "non-free", "libcuda1", "libcuda.so.1"
SKIPPED = 77


def find_libcuda() -> Path | None:
    """The library, if it was fetched before."""
    return next(FOLDER.rglob(LIBRARY), None)


def fetch_libcuda() -> Path:
    """Downloads and unpacks it. Raises PackageError if apt or dpkg fails."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    apt = FOLDER / "apt"
    machine = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True)
    options = apt_options(SUITE, apt, architecture=machine.stdout.strip(), component=COMPONENT)
    run(["apt-get", *options, "-q", "update"])
    run(["apt-get", *options, "-q", "download", PACKAGE], folder=apt)
    for package in apt.glob("*.deb"):
        run(["dpkg", "-x", package, FOLDER])
    shutil.rmtree(apt)
    found = find_libcuda()
    if found is None:
        raise PackageError(f"there is no {LIBRARY} in Debian's package {PACKAGE}")
    return found


def main() -> int:
    missing = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    if missing:
        print(f"skipped: not installed: {', '.join(missing)}", file=sys.stderr)
        return SKIPPED
    try:
        print(find_libcuda() or fetch_libcuda())
    except PackageError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Debian packages of arm64, downloaded and unpacked into a folder of their own.

For a sysroot to build against, or a Python to run under emulation, on a machine of any
architecture and without changing its own packages. apt resolves the dependencies by a private
configuration: its own lists, cache and (empty) record of what is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
REQUIRED_PROGRAMS = {"apt-get": "apt", "dpkg": "dpkg"}
STAMP = "packages.txt"
# Folders of which Debian 12 and later keep one copy, under usr.
MERGED_FOLDERS = ("bin", "lib", "sbin")


class PackageError(Exception):
    """A package cannot be downloaded or unpacked; the message says why."""


def run(command: Sequence[str | Path], *, folder: Path | None = None) -> None:
    """Runs a step, in ``folder``. Raises PackageError with what it said if it fails."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        raise PackageError(f"{' '.join(map(str, command))}\n{result.stderr or result.stdout}")


def apt_options(
    suite: str, folder: Path, *, architecture: str = "arm64", component: str = "main"
) -> list[str]:
    """Options that make apt-get work on packages of `suite`, all its files in `folder`."""
    for name in ("state/lists/partial", "cache/archives/partial", "etc/preferences.d"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "state/status").write_text("")
    options = f"arch={architecture} signed-by={KEYRING}"
    source = f"deb [{options}] {MIRROR} {suite} {component}\n"
    (folder / "etc/sources.list").write_text(source)
    settings = {
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "state/status",
        "Dir::Cache": folder / "cache",
        "Dir::Etc": folder / "etc",
        "Dir::Etc::main": "-",
        "Dir::Etc::parts": "-",
        "Dir::Etc::sourcelist": folder / "etc/sources.list",
        "Dir::Etc::sourceparts": "-",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


def relink(root: Path) -> None:
    """Makes absolute symbolic links under `root` relative, so that they stay inside it."""
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if path.is_symlink() and os.readlink(path).startswith("/"):
                target = root / os.readlink(path).lstrip("/")
                path.unlink()
                path.symlink_to(os.path.relpath(target, path.parent))


def list_of(suite: str, packages: Sequence[str]) -> str:
    """What the stamp of a folder with these packages says."""
    return "\n".join([suite, *packages]) + "\n"


def are_unpacked(suite: str, packages: Sequence[str], root: Path) -> bool:
    """Whether ``root`` holds these packages, so that unpack_packages has nothing to do."""
    stamp = root / STAMP
    return stamp.exists() and stamp.read_text() == list_of(suite, packages)


def unpack_packages(suite: str, packages: Sequence[str], root: Path) -> Path:
    """Unpacks `packages` and what they depend on into `root`; does nothing if it holds them.

    Args:
        suite: name of a Debian release, for example "bookworm".
        packages: names of packages.
        root: folder, emptied first if it holds other packages.

    Returns:
        root, absolute. Nothing is configured: no script of a package is run.

    Raises:
        PackageError: if apt or dpkg fails.
    """
    root = root.resolve()
    if are_unpacked(suite, packages, root):
        return root
    shutil.rmtree(root, ignore_errors=True)
    folder = root.with_name(f"{root.name}.apt")
    shutil.rmtree(folder, ignore_errors=True)
    options = apt_options(suite, folder)
    run(["apt-get", *options, "-q", "update"])
    run(["apt-get", *options, "-q", "-y", "--download-only", "install", *packages])
    for name in MERGED_FOLDERS:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in sorted((folder / "cache/archives").glob("*.deb")):
        # Through tar, which follows the links above; dpkg -x would replace them by folders.
        content = subprocess.check_output(["dpkg", "--fsys-tarfile", package])
        command = ["tar", "-x", "--keep-directory-symlink", "-C", str(root)]
        subprocess.run(command, check=True, input=content)
    relink(root)
    shutil.rmtree(folder)
    (root / STAMP).write_text(list_of(suite, packages))
    return root

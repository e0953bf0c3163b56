"""What the repository holds: sources, and small files that tests read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_BYTES = 256 * 1024
BUILT = {".whl", ".so", ".o", ".a", ".gguf", ".safetensors", ".pyc"}


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout of git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:  # a checkout of another user
        pytest.skip(listed.stderr.strip())
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_nothing_large_or_built_is_tracked() -> None:
    """Packages that a tool fetched were once committed beside a change."""
    files = [path for path in tracked_files() if path.exists()]
    assert len(files) > 1000
    assert [path.name for path in files if path.stat().st_size > MOST_BYTES] == []
    assert [path.name for path in files if path.suffix in BUILT] == []

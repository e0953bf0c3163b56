"""Folders of GGUF files: which model one holds, and that it holds several."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError
from .part_names import name_of_whole

# What sees pictures for a model beside it, which texts do without.
_PROJECTOR = "mmproj"
# Of folders that hold a model of another kind.
_OTHER_ENDINGS = (".onnx", "_config.json", ".safetensors")


def model_of_folder(folder: Path) -> Path | None:
    """The GGUF file, or the first part of the split one, that is all that a folder has of models.

    None where there is none, or another model besides.
    """
    names = _gguf_names(folder)
    return folder / names[0] if len(set(map(name_of_whole, names))) == 1 else None


def refuse_several(folder: Path) -> None:
    """Raises UsageError for a folder of several GGUF models, and of no other kind."""
    if names := _gguf_names(folder):
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise UsageError(f"{folder} is a folder of GGUF files; give the path of one: {shown}")


def _gguf_names(folder: Path) -> list[str]:
    """In order; empty for a folder of another kind, or that cannot be read."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    if any(name == "onnx" or name.endswith(_OTHER_ENDINGS) for name in names):
        return []
    return [
        name for name in names if name.endswith(".gguf") and not name.lower().startswith(_PROJECTOR)
    ]

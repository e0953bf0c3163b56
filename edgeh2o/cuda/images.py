"""The kernels for GPUs in this package: images that tools/build_cuda_images.py made.

EDGEH2O_CUDA_IMAGES names another folder of them.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("images")
VARIABLE = "EDGEH2O_CUDA_IMAGES"


@dataclass(frozen=True, slots=True)
class Image:
    """Code for ``target``: "sm_87" is for compute capability 8.7, "compute_80" for 8.0 and on."""

    target: str
    path: Path
    made_by: str

    def read(self) -> bytes:
        """The bytes of a cubin or of PTX."""
        return zlib.decompress(self.path.read_bytes())


def find_images() -> list[Image]:
    """What there is, as its list says; empty for a package that was built without."""
    folder = Path(os.environ.get(VARIABLE) or FOLDER)
    try:
        made_by = json.loads((folder / "images.json").read_text(encoding="ascii"))["images"]
    except (OSError, ValueError, KeyError):
        return []
    images = []
    for target, compiler in made_by.items():
        path = folder / f"kernels_{target}.z"
        if path.is_file():
            images.append(Image(target, path, compiler))
    return images

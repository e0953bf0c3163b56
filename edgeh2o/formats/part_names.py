"""How the files of a split GGUF model are named: ``model-00001-of-00003.gguf`` and so on."""

from __future__ import annotations

import re

PART_NAME = re.compile(
    r"(?P<model>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL
)


def name_of_whole(name: str) -> str:
    """What all parts of a model have in common; the name itself of what is no part."""
    part = PART_NAME.fullmatch(name)
    return name if part is None else part["model"]

"""Texts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: see ``families.py``.

The pairs of their rotary embedding are parted among three axes, which are one for a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import FormatError
from .family import (
    BASE,
    GATED,
    NO_WINDOWS,
    QK_NORMS,
    TEXT_PREFIXES,
    VISION,
    TransformersFamily,
)
from .recurrent import integers
from .settings import Settings
from .sources import Sources


def _read_sections(settings: Settings, keys: dict[str, Any]) -> None:
    n_pairs = keys["rope.dimension_count"] // 2
    sections: Any = [n_pairs, 0, 0]
    for name in ("rope_scaling", "rope_parameters"):
        scaling = settings.section(name)
        if scaling is not None:
            sections = scaling.take("mrope_section", sections)
    is_known = isinstance(sections, list) and len(sections) == 3
    if (
        not is_known
        or any(type(n) is not int or n < 0 for n in sections)
        or sum(sections) != n_pairs
    ):
        raise FormatError(
            f"{settings.label('mrope_section')} is {sections!r:.60}, but must be three numbers of "
            f"pairs, {n_pairs} together"
        )
    keys["rope.dimension_sections"] = integers([*sections, 0])


def _texts(
    architecture: str, rope_base: float, tensors: Mapping[str, Sources], **options: Any
) -> TransformersFamily:
    return TransformersFamily(
        architecture=architecture,
        tensors=tensors,
        defaults={"rope_theta": rope_base},
        ignored=(
            *("vision_config", "image_token_id", "video_token_id", "vision_token_id"),
            *("vision_start_token_id", "vision_end_token_id"),
        ),
        rope_keys=("mrope_section", "mrope_interleaved"),
        read_more=_read_sections,
        prefixes=TEXT_PREFIXES,
        left_out=VISION,
        **options,
    )


QWEN_VL: Mapping[str, TransformersFamily] = {
    "qwen2_vl_text": _texts("qwen2vl", 1e6, {**BASE, **GATED}, values=NO_WINDOWS),
    "qwen2_5_vl_text": _texts("qwen2vl", 1e6, {**BASE, **GATED}, values=NO_WINDOWS),
    "qwen3_vl_text": _texts("qwen3vl", 5e5, {**BASE, **GATED, **QK_NORMS}),
}

"""Mistral and Ministral, alone and as the texts of models of images: see ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import FormatError
from .family import BASE, GATED, TEXT_PREFIXES, VISION, TransformersFamily
from .settings import Settings


def _read_ministral3(settings: Settings, keys: dict[str, Any]) -> None:
    """Queries grow with their position, and YaRN may have a multiplier of its logarithm."""
    scaling = settings.section("rope_parameters")
    if scaling is None or scaling.take("rope_type", scaling.take("type")) != "yarn":
        raise FormatError(
            f"{settings.label('rope_parameters')} must be of the type yarn for this model"
        )
    growth = scaling.number("llama_4_scaling_beta")
    if growth:
        keys["attention.temperature_scale"] = growth
    multiplier = scaling.number("mscale_all_dim", default=0.0)
    if multiplier and scaling.take("mscale"):  # without the one the other has no effect
        scaling.require("mscale", (1.0,))
        keys["rope.scaling.yarn_log_multiplier"] = multiplier


MISTRAL: Mapping[str, TransformersFamily] = {
    "mistral": TransformersFamily(
        architecture="llama",
        tensors={**BASE, **GATED},
        defaults={"sliding_window": 4096},
        has_windows=True,
        prefixes=TEXT_PREFIXES,
        left_out=VISION,
    ),
    "ministral": TransformersFamily(
        architecture="llama", tensors={**BASE, **GATED}, has_windows=True, needs_windows=True
    ),
    "ministral3": TransformersFamily(
        architecture="mistral3",
        tensors={**BASE, **GATED},
        values={"sliding_window": (None,)},
        rope_keys=("mscale", "mscale_all_dim", "llama_4_scaling_beta", "max_position_embeddings"),
        read_more=_read_ministral3,
        prefixes=TEXT_PREFIXES,
        left_out=VISION,
    ),
}

"""Tiny folders as transformers saves them: its config.json, names and shapes; seeded weights.

What transformers makes of such a folder is recorded by tools/update_folder_goldens.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .safetensors_files import write_safetensors

_FACTORS = (
    *("norm.weight", "ln_f.weight", "ln_attn.weight", "ln_mlp.weight", ".D"),
    *("norm_1.weight", "norm_2.weight", "transformer.norm_f.weight"),
)
FOLDER = Path(__file__).parent.parent / "golden" / "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A recorded folder: ``log_probabilities`` are float32 [positions, vocabulary]."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    log_probabilities: NDArray[np.float32]

    @property
    def text_config(self) -> Mapping[str, Any]:
        """Of a model of images the part for texts."""
        part: Mapping[str, Any] = self.config.get("text_config", self.config)
        return part


def read_published(case: str) -> Published:
    with np.load(FOLDER / f"{case}.npz") as golden:
        return Published(
            config=json.loads(str(golden["config"])),
            shapes={name: tuple(each) for name, each in json.loads(str(golden["shapes"])).items()},
            tokens=golden["tokens"],
            positions=golden["positions"],
            log_probabilities=golden["log_probabilities"],
        )


def write_published(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Writes config.json and one file of safetensors into an empty folder."""
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: seeded_weights(name, shape) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", weights, "F32")


def seeded_weights(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Vectors are near 1 where they multiply and near 0 where they are added."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    normal = rng.standard_normal(shape)
    if name.endswith("act_fn.eps"):  # takes the place of 0, from below
        values = -0.1 - np.abs(0.3 * normal)
    elif name.endswith("moe_statics.e_score_correction_bias"):  # small beside shares, as in models
        values = 0.1 * normal
    elif len(shape) > 1:
        values = normal * (0.5 if "conv" in name else 1.3 * min(shape[-2:]) ** -0.5)
    elif name.endswith(_FACTORS):
        values = 1.0 + 0.1 * normal
    else:
        values = 0.3 * normal
    if name.endswith("q_norm.weight"):  # else Gemma 4, which does not scale logits, is all peaks
        values = 0.3 * values
    return np.asarray(values, np.float32)

"""Budget tables of loaded models, without a calibration or by one of few windows."""

from __future__ import annotations

from typing import Any

import pytest

from edgeh2o.attention.budget_table import BudgetTable
from edgeh2o.attention.rounding_quality import RoundingQuality
from edgeh2o.engine.calibration import LEVELS
from edgeh2o.evaluation import calibration_windows
from edgeh2o.evaluation.long_texts import KINDS
from edgeh2o.model_config import ModelConfig


def table_of_model(
    config: ModelConfig, errors: tuple[tuple[float, ...], ...], **fields: Any
) -> BudgetTable:
    """A table of the model's KV heads; ``errors`` has as many rows, or one that serves all."""
    n_heads = config.n_layers * config.n_kv_heads
    return BudgetTable(
        model="tiny",
        fingerprint=config.fingerprint,
        n_layers=config.n_layers,
        n_kv_heads=config.n_kv_heads,
        errors=errors if len(errors) == n_heads else errors * n_heads,
        **fields,
    )


def harmless_table(
    config: ModelConfig,
    budget: int,
    errors: tuple[float, ...] = tuple(1.0 / level for level in LEVELS),
    rounding: RoundingQuality | None = None,
) -> BudgetTable:
    """One by which ``budget`` keys lose nothing; ``errors`` are those of every head, by level."""
    return table_of_model(
        config,
        (errors,),
        chunk_size=256,
        length=4096,
        mean_past=2500.0,
        levels=tuple(LEVELS),
        losses={budget: 0.0},
        texts=("none",),
        rounding=rounding,
    )


def calibrate_by_few_windows(patch: pytest.MonkeyPatch) -> None:
    """Lets ``calibrate`` measure losses on one window instead of sixteen and more."""
    patch.setattr(calibration_windows, "KINDS", {"pairs": KINDS["pairs"]})
    patch.setattr(calibration_windows, "_SEEDS", (0,))
    patch.setattr(calibration_windows, "_LONG_KINDS", ())

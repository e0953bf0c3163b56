"""Tiny models with what drafts for them, whose drafts by llama.cpp are recorded in tests/golden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.make_tiny_model import write_tiny_model
from tools.tiny_models.drafters import Tensors, write_assistant, write_dflash, write_eagle3
from tools.tiny_models.model import TinyModel

FILE = Path(__file__).parent / "golden" / "drafters.json"
N_DRAFTED, N_TOKENS = 3, 12
VOCAB_SIZE = 320
PROMPT = np.random.default_rng(3).integers(3, 250, 60).tolist()
# Candidates that llama.cpp's log names of a guess, and those that it weighs.
N_NAMED, N_WEIGHED = 3, 10

GEMMA4: Mapping[str, Any] = {
    "architecture": "gemma4",
    "n_layers": 6,
    "model_dim": 128,
    "ffn_dim": 96,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "head_dim": 64,
    "head_dim_sliding": 32,
    "rope_base": 1e6,
    "rope_base_sliding": 1e4,
    "tied": False,
}
LLAMA: Mapping[str, Any] = {
    "architecture": "llama",
    "n_layers": 4,
    "model_dim": 128,
    "ffn_dim": 96,
    "tied": False,
}


@dataclass(frozen=True)
class DrafterCase:
    """Options of the model, and of what drafts for it, which ``write`` writes."""

    model: Mapping[str, Any]
    write: Callable[..., Path]
    options: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[Tensors], None] | None = None  # of the model

    @property
    def spec_type(self) -> str:
        """What llama.cpp calls it."""
        names = {write_assistant: "draft-mtp", write_dflash: "draft-dflash"}
        return names.get(self.write, "draft-eagle3")

    def write_both(self, folder: Path) -> tuple[Path, Path]:
        """The files of the model and of what drafts for it."""
        model = write_tiny_model(folder / "model.gguf", edit=self.edit, **self.model)
        return model, self.write(folder / "drafter.gguf", TinyModel(**self.model), **self.options)


def _grow_queries(tensors: Tensors) -> None:
    """Queries of a few dimensions are large, and keys there as small."""
    for name, values in tensors.items():
        if name.endswith("_norm.weight") and values.ndim == 1 and ".attn_" in name:
            if "attn_q_norm" in name:
                values[:3] *= 8
            elif "attn_k_norm" in name:
                values[:3] /= 8


CASES: Mapping[str, DrafterCase] = {
    "assistant": DrafterCase({**GEMMA4, "n_shared_kv": 3, "token_input_dim": 8}, write_assistant),
    # Whose keys are cached in other sizes than the projections make them.
    "assistant_own_keys": DrafterCase(
        {**GEMMA4, "n_kv_heads": (2, 2, 1, 2, 2, 1)},
        write_assistant,
        {"seed": 5},
        _grow_queries,
    ),
    "eagle3": DrafterCase(
        LLAMA, write_eagle3, {"layers": (1, 2, 3), "guessed": range(3, VOCAB_SIZE, 2)}
    ),
    "eagle3_normed": DrafterCase(
        {**LLAMA, "architecture": "qwen3"},
        write_eagle3,
        {"norms_features": True, "norms_residual": True, "has_embedding": True},
    ),
    "eagle3_shared": DrafterCase(LLAMA, write_eagle3, {"has_output": False, "seed": 7}),
    "dflash": DrafterCase(
        {**LLAMA, "architecture": "qwen3"}, write_dflash, {"layers": (1, 2, 3), "seed": 3}
    ),
    "dflash_windows": DrafterCase(
        LLAMA,
        write_dflash,
        {"window": 20, "n_layers": 3, "has_embedding": True, "has_output": False},
    ),
    "dflash_few_tokens": DrafterCase(
        LLAMA, write_dflash, {"guessed": range(3, VOCAB_SIZE, 2), "layers": (1, 3)}
    ),
}

"""PLM for update_folder_goldens.py: transformers has its parts, and no model of that name.

As the code that its authors proposed for transformers has it (``models/plm/modular_plm.py``).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.arcee.modeling_arcee import ArceeMLP
from transformers.models.youtu.configuration_youtu import YoutuConfig
from transformers.models.youtu.modeling_youtu import YoutuForCausalLM


class PlmConfig(YoutuConfig):
    """Latent attention whose queries come of one matrix, and networks without a gate."""

    model_type = "plm"
    mlp_bias: bool = False

    def to_dict(self) -> dict[str, Any]:
        settings: dict[str, Any] = super().to_dict()
        settings.pop("embedding_initializer_range", None)  # which is Youtu-LLM's
        return settings


class PlmForCausalLM(YoutuForCausalLM):
    """Youtu-LLM with the feed-forward networks of AFM."""

    config_class = PlmConfig

    def __init__(self, config: PlmConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            mlp: nn.Module = ArceeMLP(config)
            layer.mlp = mlp


def register() -> None:
    """Makes ``plm`` known to transformers."""
    AutoConfig.register("plm", PlmConfig, exist_ok=True)
    AutoModelForCausalLM.register(PlmConfig, PlmForCausalLM, exist_ok=True)

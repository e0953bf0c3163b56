"""Layers that guess tokens ahead (MTP, NextN), which lie behind the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from tools.tiny_models.model import DELTA_NET_PERIOD, TinyModel
from tools.tiny_models.normal_numbers import NormalNumbers

Tensors = dict[str, NDArray[np.float32]]
AddLayer = Callable[[Tensors, Callable[..., None], TinyModel, int], None]


def add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    """How many there are."""
    if model.n_drafting_layers:
        key = f"{model.architecture}.nextn_predict_layers"
        writer.add_uint32(key, model.n_drafting_layers)


def drafting_tensors(rng: NormalNumbers, model: TinyModel, add_layer: AddLayer) -> Tensors:
    """Each layer has attention, and what joins its two inputs."""
    tensors: Tensors = {}
    source, width = DELTA_NET_PERIOD - 1, model.model_dim
    for layer in range(model.n_layers, model.n_layers + model.n_drafting_layers):
        own: Tensors = {}

        def normal(
            name: str, *shape: int, std: float, mean: float = 0.0, own: Tensors = own
        ) -> None:
            own[name] = (mean + std * rng.standard_normal(shape)).astype(np.float32)

        # A layer of this number attends in a model of any length.
        n_dense = source + 1 if model.family.drafts_dense else model.n_dense_layers
        like = replace(model, n_layers=source + 1, n_dense_layers=n_dense)
        add_layer(own, normal, like, source)
        prefix = f"blk.{source}.nextn."
        normal(f"{prefix}eh_proj.weight", width, 2 * width, std=(2 * width) ** -0.5)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            normal(f"{prefix}{name}.weight", width, std=0.1, mean=1.0)
        old = f"blk.{source}."
        tensors |= {f"blk.{layer}.{name.removeprefix(old)}": own[name] for name in own}
    return tensors

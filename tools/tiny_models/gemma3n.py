"""What gemma3n has beside gemma4's inputs per token and shared keys and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from tools.tiny_models.model import TinyModel

N_STREAMS = 4
# Those that llama.cpp runs, whatever a file says.
LAUREL_RANK = 64
N_CUT_LAYERS = 10
# The quantile of 95%, which llama.cpp does not read.
CUTOFF = 1.6448533535003662
# Matrices that llama-quantize leaves as they are, and rows of vectors.
FLOAT_MATRICES = (".altup_router.weight", ".laurel_l.weight", ".laurel_r.weight")
STACKS = ("altup_proj.weight", "altup_unembd_proj.weight")
VECTOR_SUFFIXES = ("altup_predict_coef.weight", "altup_correct_coef.weight")


def add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    writer.add_uint32(f"{model.architecture}.attention.shared_kv_layers", model.n_shared_kv)
    key = f"{model.architecture}.embedding_length_per_layer_input"
    writer.add_uint32(key, model.input_dim)
    writer.add_sliding_window_pattern(model.pattern)
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(N_STREAMS)
    n_cut = min(N_CUT_LAYERS, model.n_layers) if model.n_cut_layers is None else model.n_cut_layers
    none = float("-inf")
    cutoffs = [CUTOFF if layer < n_cut else none for layer in range(model.n_layers)]
    writer.add_activation_sparsity_scale(cutoffs)


def add_stacks(normal: Callable[..., None], width: int) -> None:
    """What makes the other streams of the embedding, and what they become behind the layers."""
    for name in STACKS:
        normal(name, N_STREAMS - 1, width, width, std=width**-0.5)


def add_layer(
    tensors: dict[str, NDArray[np.float32]],
    normal: Callable[..., None],
    model: TinyModel,
    layer: int,
) -> None:
    """Modes of a layer are a tanh of a sum over the width, divided by it: far from 0 here."""
    prefix, width = f"blk.{layer}.", model.model_dim
    # Logits are not divided by the root of the head size.
    tensors[f"{prefix}attn_q_norm.weight"] *= np.float32(model.head_dims[layer] ** -0.5)
    normal(f"{prefix}altup_router.weight", N_STREAMS, width, std=width**0.5)
    normal(f"{prefix}altup_router_norm.weight", width, std=0.1, mean=1.0)
    normal(f"{prefix}altup_predict_coef.weight", N_STREAMS**2, N_STREAMS, std=0.05)
    normal(f"{prefix}altup_correct_coef.weight", N_STREAMS, N_STREAMS, std=0.1)
    normal(f"{prefix}altup_correct_scale.weight", width, std=0.1, mean=1.0)
    normal(f"{prefix}laurel_l.weight", LAUREL_RANK, width, std=width**-0.5)
    normal(f"{prefix}laurel_r.weight", width, LAUREL_RANK, std=LAUREL_RANK**-0.5)
    normal(f"{prefix}laurel_post_norm.weight", width, std=0.1, mean=1.0)

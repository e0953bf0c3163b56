"""Keys of gemma4: heads of layers with a window, shared keys and values, inputs per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from tools.make_tiny_model import TinyModel


def add_metadata(writer: GGUFWriter, model: TinyModel) -> None:
    sliding = model.head_dim_sliding or model.head_dim
    for key, value in {
        "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding,
        "attention.shared_kv_layers": model.n_shared_kv,
        "rope.dimension_count_swa": sliding,
        "embedding_length_per_layer_input": model.token_input_dim,
    }.items():
        writer.add_uint32(f"{model.architecture}.{key}", value)
    writer.add_sliding_window_pattern(model.pattern)

"""Tiny files of what drafts for one tiny model: assistants of Gemma 4, EAGLE-3 and DFlash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from tools.tiny_models.model import TinyModel
from tools.tiny_models.normal_numbers import NormalNumbers
from tools.tiny_models.tokenizer import add_tokenizer

Tensors = dict[str, NDArray[np.float32]]
Edit = Callable[[Tensors], None]
FFN_DIM = 96


class _Weights:
    """Random tensors by name, in the order in which they are asked for."""

    def __init__(self, seed: int) -> None:
        self.tensors: Tensors = {}
        self._rng = NormalNumbers(seed)

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        values = mean + std * self._rng.standard_normal(shape)
        self.tensors[name] = values.astype(np.float32)

    def gains(self, width: int, name: str) -> None:
        """Of a norm."""
        self.normal(f"{name}.weight", width, std=0.1, mean=1.0)

    def add_tokens(self, name: str, n_tokens: int, width: int) -> None:
        """A row for every token."""
        self.normal(f"{name}.weight", n_tokens, width, std=2.0 * width**-0.5)

    def add_network(self, prefix: str, width: int, ffn_dim: int) -> None:
        """Gate, up and down of a layer."""
        for name in ("gate", "up"):
            self.normal(f"{prefix}ffn_{name}.weight", ffn_dim, width, std=width**-0.5)
        self.normal(f"{prefix}ffn_down.weight", width, ffn_dim, std=ffn_dim**-0.5)


def write_assistant(
    path: Path,
    model: TinyModel,
    *,
    model_dim: int = 64,
    n_heads: int = 4,
    ffn_dim: int = FFN_DIM,
    tensor_type: str = "F32",
    seed: int = 1,
    edit: Edit | None = None,
    **keys: int,
) -> Path:
    """Of a gemma4: two layers with a window, and one without; ``keys`` replace what they say."""
    weights = _Weights(seed)
    normal, gains = weights.normal, weights.gains
    pattern = (True, True, False)
    of_kind = {has_window: i for i, has_window in enumerate(model.pattern)}  # the last of each
    lenders = [of_kind[has_window] for has_window in pattern]
    width = model.model_dim
    weights.add_tokens("token_embd", model.vocab_size, model_dim)
    gains(model_dim, "output_norm")
    normal("nextn.pre_projection.weight", model_dim, 2 * width, std=(2 * width) ** -0.5)
    normal("nextn.post_projection.weight", width, model_dim, std=model_dim**-0.5)
    factors = np.ones(model.n_pairs, np.float32)
    factors[model.n_pairs // 4 :] = 1e30
    weights.tensors["rope_freqs.weight"] = factors
    for layer, lender in enumerate(lenders):
        prefix, head_dim = f"blk.{layer}.", model.head_dims[lender]
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            gains(model_dim, f"{prefix}{name}")
        normal(f"{prefix}attn_q.weight", n_heads * head_dim, model_dim, std=model_dim**-0.5)
        gains(head_dim, f"{prefix}attn_q_norm")
        normal(f"{prefix}attn_output.weight", model_dim, n_heads * head_dim, std=0.1)
        weights.add_network(prefix, model_dim, ffn_dim)
        normal(f"{prefix}layer_output_scale.weight", 1, std=0.1, mean=0.9)
    if edit is not None:
        edit(weights.tensors)
    sliding = model.head_dim_sliding or model.head_dim
    numbers: dict[str, int | Sequence[int]] = {
        "attention.head_count_kv": [model.layers[lender][1] for lender in lenders],
        "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding,
        "rope.dimension_count_swa": sliding,
        "attention.sliding_window": model.sliding_window or 24,
        "attention.shared_kv_layers": len(pattern),
        "embedding_length_out": width,
        "embedding_length_per_layer_input": 0,
        "nextn_predict_layers": len(pattern),
    }
    writer = _begin(path, "gemma4-assistant", model, model_dim, n_heads, len(pattern), ffn_dim)
    _add_numbers(writer, {**numbers, **keys})
    writer.add_sliding_window_pattern(list(pattern))
    if model.rope_base_sliding is not None:
        writer.add_rope_freq_base_swa(model.rope_base_sliding)
    return _end(writer, path, weights.tensors, tensor_type)


def write_eagle3(
    path: Path,
    model: TinyModel,
    *,
    layers: Sequence[int] = (0, 1, 2),
    guessed: Sequence[int] | None = None,
    model_dim: int | None = None,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    has_embedding: bool = False,
    has_output: bool = True,
    norms_features: bool = False,
    norms_residual: bool = False,
    ffn_dim: int = FFN_DIM,
    tensor_type: str = "F32",
    seed: int = 1,
    edit: Edit | None = None,
    **keys: int,
) -> Path:
    """It reads what comes before ``layers``, and has logits of ``guessed``; None: of all tokens."""
    weights = _Weights(seed)
    normal, gains = weights.normal, weights.gains
    width, features = model_dim or model.model_dim, len(layers) * model.model_dim
    head_dim = model.head_dim
    if has_embedding:
        weights.add_tokens("token_embd", model.vocab_size, width)
    gains(width, "output_norm")
    if has_output:
        weights.add_tokens("output", model.vocab_size if guessed is None else len(guessed), width)
    if norms_features:
        gains(features, "enc.output_norm")
    normal("fc.weight", width, features, std=features**-0.5)
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        gains(width, f"blk.0.{name}")
    for letter, n in (("q", n_heads), ("k", n_kv_heads), ("v", n_kv_heads)):
        normal(f"blk.0.attn_{letter}.weight", n * head_dim, 2 * width, std=width**-0.5)
    normal("blk.0.attn_output.weight", width, n_heads * head_dim, std=0.2)
    weights.add_network("blk.0.", width, ffn_dim)
    if edit is not None:
        edit(weights.tensors)
    writer = _begin(path, "eagle3", model, width, n_heads, 1, ffn_dim)
    writer.add_array("eagle3.target_layers", list(layers))
    numbers = {"attention.head_count_kv": n_kv_heads, "target_hidden_size": model.model_dim}
    _add_numbers(writer, {**numbers, **keys})
    writer.add_bool("eagle3.norm_before_fc", norms_features)
    writer.add_bool("eagle3.norm_before_residual", norms_residual)
    if guessed is not None:
        writer.add_tensor("d2t", np.asarray(guessed, np.int64))
    return _end(writer, path, weights.tensors, tensor_type)


def write_dflash(
    path: Path,
    model: TinyModel,
    *,
    layers: Sequence[int] = (0, 1, 2),
    n_layers: int = 2,
    n_kv_heads: int = 2,
    guessed: Sequence[int] | None = None,
    has_embedding: bool = False,
    has_output: bool = True,
    block_size: int = 8,
    mask_token: int = 300,
    window: int = 0,
    ffn_dim: int = FFN_DIM,
    tensor_type: str = "F32",
    seed: int = 1,
    edit: Edit | None = None,
    **keys: int,
) -> Path:
    """It reads what comes before ``layers``; the first of its own have a ``window``, 0 for none."""
    weights = _Weights(seed)
    normal, gains = weights.normal, weights.gains
    width, features = model.model_dim, len(layers) * model.model_dim
    n_heads, head_dim = 4, model.head_dim
    if has_embedding:
        weights.add_tokens("token_embd", model.vocab_size, width)
    gains(width, "output_norm")
    if has_output:
        weights.add_tokens("output", model.vocab_size if guessed is None else len(guessed), width)
    gains(width, "enc.output_norm")
    normal("fc.weight", width, features, std=features**-0.5)
    for layer in range(n_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            gains(width, f"{prefix}{name}")
        for letter, n in (("q", n_heads), ("k", n_kv_heads), ("v", n_kv_heads)):
            normal(f"{prefix}attn_{letter}.weight", n * head_dim, width, std=width**-0.5)
        for letter in "qk":
            gains(head_dim, f"{prefix}attn_{letter}_norm")
        normal(f"{prefix}attn_output.weight", width, n_heads * head_dim, std=0.2)
        weights.add_network(prefix, width, ffn_dim)
    if edit is not None:
        edit(weights.tensors)
    writer = _begin(path, "dflash", model, width, n_heads, n_layers, ffn_dim)
    writer.add_array("dflash.target_layers", list(layers))
    writer.add_mask_token_id(mask_token)
    writer.add_bool("dflash.attention.causal", False)
    _add_numbers(writer, {"attention.head_count_kv": n_kv_heads, "block_size": block_size, **keys})
    if window:
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([layer + 1 < n_layers for layer in range(n_layers)])
    if guessed is not None:
        writer.add_tensor("d2t", np.asarray(guessed, np.int64))
    return _end(writer, path, weights.tensors, tensor_type)


def _begin(
    path: Path,
    architecture: str,
    model: TinyModel,
    model_dim: int,
    n_heads: int,
    n_layers: int,
    ffn_dim: int,
) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(model.context_length)
    writer.add_embedding_length(model_dim)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(ffn_dim)
    writer.add_head_count(n_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(2 * model.n_pairs)
    writer.add_rope_freq_base(model.rope_base)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_vocab_size(model.vocab_size)
    add_tokenizer(writer, model.vocab_size)
    return writer


def _add_numbers(writer: GGUFWriter, numbers: dict[str, int | Sequence[int]]) -> None:
    for key, value in numbers.items():
        name = f"{writer.arch}.{key}"
        if isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_array(name, list(value))


def _end(writer: GGUFWriter, path: Path, tensors: Tensors, tensor_type: str) -> Path:
    for name, values in tensors.items():
        kind = GGMLQuantizationType[tensor_type if values.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Writes a GGUF file of random weights in the shape of a real model, for measuring speed.

    python -m tools.make_shape_model llama-3.2-1b Q4_K_M model.gguf

The quantised blocks are random bytes with scales that give weights of a standard deviation of
about 0.02: every speed is that of the real model, the answers mean nothing. Which tensors of a
mixture have which type is what llama-quantize chooses. The tokenizer, and with it the size of
the vocabulary, is another file's. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType

from edgeh2o.errors import EdgeH2OError
from edgeh2o.formats.model_cache import resolve_model
from tools.shape_models.encoders import add_encoder_metadata
from tools.shape_models.experts import add_expert_metadata
from tools.shape_models.mixed_streams import add_stream_metadata
from tools.shape_models.recurrent import add_recurrent_metadata
from tools.shape_models.shape import Shape
from tools.shape_models.shapes import SHAPES
from tools.shape_models.tensors import FILE_TYPES, shape_tensors
from tools.shape_models.values import random_values
from tools.tiny_models.gemma3n import CUTOFF, N_CUT_LAYERS, N_STREAMS

DEFAULT_TOKENIZER = "smollm2-135m"


def write_shape_model(
    path: Path | str,
    shape: str | Shape,
    file_type: str,
    *,
    tokenizer_from: Path | str = DEFAULT_TOKENIZER,
    n_layers: int | None = None,
    has_drafting: bool = False,
    seed: int = 0,
) -> Path:
    """Writes the file, one tensor in memory at a time; returns its path.

    Args:
        shape: one of SHAPES by its name, or sizes of your own.
        file_type: one of FILE_TYPES.
        tokenizer_from: a GGUF file, or the name of a known model.
        n_layers: how many layers to write; None for all.
        has_drafting: with a layer that guesses tokens ahead (MTP).

    Raises:
        ValueError: for another shape, type or number of layers, or drafting without delta nets.
        ResourceError: if the file of the tokenizer is not there.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"{shape} is not one of {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    if file_type not in FILE_TYPES:
        raise ValueError(f"{file_type} is not one of {', '.join(FILE_TYPES)}")
    if n_layers is not None:
        if not 1 <= n_layers <= shape.n_layers:
            raise ValueError(f"the number of layers is 1 to {shape.n_layers}")
        if (gemma4 := shape.gemma4) is not None:
            n_shared = max(0, n_layers - (shape.n_layers - gemma4.n_shared_kv))
            shape = replace(shape, gemma4=replace(gemma4, n_shared_kv=n_shared))
        shape = replace(shape, n_layers=n_layers)
    if has_drafting:
        if shape.delta_net is None:
            raise ValueError("a layer that guesses tokens ahead is for shapes with delta nets")
        shape = replace(shape, n_drafting_layers=1)
    path = Path(path)
    writer = GGUFWriter(path, shape.architecture)
    vocab_size = _copy_tokenizer(writer, resolve_model(tokenizer_from))
    _add_metadata(writer, shape, vocab_size)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{file_type}"])
    tensors = list(shape_tensors(shape, file_type, vocab_size))
    for tensor in tensors:
        raw_type = GGMLQuantizationType[tensor.type_name]
        # A dtype other than uint8 says that the shape counts values and not bytes.
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.n_bytes, raw_type)
    source = np.random.SFC64(seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(random_values(tensor, shape, source))
    writer.close()
    return path


def _copy_tokenizer(writer: GGUFWriter, path: Path) -> int:
    """Copies the metadata of a file's tokenizer; returns the number of its tokens."""
    fields = GGUFReader(path).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    return len(fields["tokenizer.ggml.tokens"].data)


def _add_metadata(writer: GGUFWriter, shape: Shape, vocab_size: int) -> None:
    writer.add_name("random weights")
    writer.add_block_count(shape.n_layers + shape.n_drafting_layers)
    if shape.n_drafting_layers:
        key = f"{shape.architecture}.nextn_predict_layers"
        writer.add_uint32(key, shape.n_drafting_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.model_dim)
    sizes = [shape.layer_sizes(layer) for layer in range(shape.n_layers)]
    widths = [ffn_dim for _, ffn_dim, _ in sizes]
    writer.add_feed_forward_length(widths if len(set(widths)) > 1 else shape.ffn_dim)
    writer.add_head_count(shape.n_heads)
    if shape.attention_layers:
        if shape.mamba2 is None and shape.mamba1 is None:
            writer.add_shortconv_l_cache(shape.n_conv_taps)
        kv_heads = [shape.n_kv_heads * shape.attends(layer) for layer in range(shape.n_layers)]
        writer.add_head_count_kv(kv_heads)
    else:
        writer.add_head_count_kv(shape.n_kv_heads)
    if shape.n_heads:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_rope_dimension_count(shape.rotary_dim or shape.head_dim)
    if shape.encoder is not None:
        add_encoder_metadata(writer, shape, shape.encoder)
    add_recurrent_metadata(writer, shape)
    add_expert_metadata(writer, shape)
    add_stream_metadata(writer, shape)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_vocab_size(vocab_size)
    if (gemma4 := shape.gemma4) is None:
        return
    writer.add_sliding_window(gemma4.window)
    writer.add_sliding_window_pattern([shape.has_window(i) for i in range(shape.n_layers)])
    writer.add_rope_freq_base_swa(1e4)
    writer.add_final_logit_softcapping(30.0)
    numbers = {
        "attention.shared_kv_layers": gemma4.n_shared_kv,
        "embedding_length_per_layer_input": gemma4.token_input_dim,
    }
    if gemma4.has_streams:
        writer.add_altup_active_idx(0)
        writer.add_altup_num_inputs(N_STREAMS)
        cutoffs = [CUTOFF if i < N_CUT_LAYERS else -np.inf for i in range(shape.n_layers)]
        writer.add_activation_sparsity_scale(cutoffs)
    else:
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            numbers[f"{key}_swa"] = gemma4.head_dim_sliding
    for key, value in numbers.items():
        writer.add_uint32(f"{shape.architecture}.{key}", value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make_shape_model", description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file_type", choices=FILE_TYPES)
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument(
        "--tokenizer-from",
        default=DEFAULT_TOKENIZER,
        metavar="FILE",
        help=f"GGUF file, or name of a known model, whose tokenizer is taken ({DEFAULT_TOKENIZER})",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="write the first N layers only")
    parser.add_argument(
        "--drafting", action="store_true", help="with a layer that guesses tokens ahead (MTP)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args(arguments)
    try:
        write_shape_model(
            options.path,
            options.shape,
            options.file_type,
            tokenizer_from=options.tokenizer_from,
            n_layers=options.layers,
            has_drafting=options.drafting,
            seed=options.seed,
        )
    except (OSError, ValueError, EdgeH2OError) as error:
        print(f"make_shape_model: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

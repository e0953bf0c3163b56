"""Writes a small seeded GGUF model, for tests and benches.

    python -m tools.make_tiny_model tiny.gguf --architecture qwen3 --tensor-type Q4_0 --seed 1

The weights are random, scaled so that attention is peaked and the logits depend on the
whole context. The vocabulary is a byte-level BPE in the style of SmolLM2: three control
tokens, 256 bytes, a few merges. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from tests.reference.codebook_quants import CODEBOOK_TYPES, quantize_codebook
from tests.reference.k_quants import K_TYPES, quantize_k
from tests.tiny_architectures import ENCODERS, FAMILIES
from tools.tiny_models import gemma3n, mixed_streams, recurrent
from tools.tiny_models.experts import ROUTER_SUFFIX
from tools.tiny_models.metadata import add_metadata
from tools.tiny_models.model import FLOAT_TYPES, ROPE_SCALINGS, TENSOR_TYPES, PerLayer, TinyModel
from tools.tiny_models.tensors import Tensors, random_tensors
from tools.tiny_models.tokenizer import add_tokenizer, add_unigram, add_wordpiece


def write_tiny_model(
    path: Path | str, *, edit: Callable[[Tensors], None] | None = None, **options: object
) -> Path:
    """Writes the model that `TinyModel(**options)` describes; returns the path.

    Args:
        edit: changes the tensors (float32 [rows, cols] or [n] by GGUF name) before they are
            encoded and written.

    Raises:
        ValueError: if an option is out of range, or a width does not fit the tensor type.
    """
    model = TinyModel(**options)  # type: ignore[arg-type]
    path = Path(path)
    writer = GGUFWriter(path, model.architecture)
    add_metadata(writer, model)
    if model.has_unigram:
        add_unigram(writer, model.vocab_size)
    elif model.family.has_sum_norms:
        add_wordpiece(writer, model.vocab_size)
    else:
        add_tokenizer(writer, model.vocab_size, has_markers=model.has_markers)
    tensors = random_tensors(model)
    if edit is not None:
        edit(tensors)
    for name, values in tensors.items():
        _add_tensor(writer, name, values, _type_of(name, values, model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type_of(name: str, values: NDArray[np.float32], model: TinyModel) -> str:
    vectors = (ROUTER_SUFFIX, *recurrent.VECTOR_SUFFIXES, *gemma3n.VECTOR_SUFFIXES, ".bias")
    vectors += (".attn_q_norm.weight", ".attn_k_norm.weight", "token_types.weight")
    vectors += (".ple_norm_query.weight",)
    vectors += mixed_streams.VECTOR_SUFFIXES
    if values.ndim == 1 or name.endswith((*vectors, ".lora_a", ".lora_b")):
        return "F32"
    if name.endswith(gemma3n.FLOAT_MATRICES) or name in gemma3n.STACKS:
        return model.tensor_type if model.tensor_type in FLOAT_TYPES else "F16"
    short = recurrent.SHORT_ROWS
    if model.family.mixes_streams:
        short += (*mixed_streams.SHORT_ROWS, mixed_streams.TABLE)
        if name == mixed_streams.TABLE and values.shape[1] % 32:
            return model.tensor_type if model.tensor_type in FLOAT_TYPES else "F16"
    if name.endswith(short) and model.tensor_type in (*K_TYPES, *CODEBOOK_TYPES):
        return "Q8_0"  # rows are shorter than blocks
    if name in ("token_embd.weight", "output.weight"):
        return model.embedding_type or model.tensor_type
    return model.tensor_type


def _add_tensor(writer: GGUFWriter, name: str, values: NDArray[np.float32], type_name: str) -> None:
    if type_name in K_TYPES or type_name in CODEBOOK_TYPES:
        quantize_rows = quantize_k if type_name in K_TYPES else quantize_codebook
        rows = quantize_rows(values.reshape(-1, values.shape[-1]), type_name)
        data = rows.reshape(*values.shape[:-1], -1)
    else:
        data = quantize(values, GGMLQuantizationType[type_name])
    writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[type_name])


def _per_layer(text: str) -> PerLayer:
    numbers = tuple(map(int, text.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line, named like the fields of TinyModel."""
    parser = argparse.ArgumentParser(prog="make_tiny_model", description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--architecture", choices=[*FAMILIES, *ENCODERS], default="llama")
    parser.add_argument("--tensor-type", choices=TENSOR_TYPES, default="F32")
    parser.add_argument("--embedding-type", choices=TENSOR_TYPES)
    for item in fields(TinyModel):
        flag, kind = "--" + item.name.replace("_", "-"), str(item.type).partition(" ")[0]
        if kind == "PerLayer":
            parser.add_argument(flag, type=_per_layer, default=item.default, metavar="N[,N...]")
        elif kind in ("int", "float"):
            number = int if kind == "int" else float
            parser.add_argument(flag, type=number, default=item.default, metavar=number.__name__)
    parser.add_argument("--rope-scaling", choices=ROPE_SCALINGS)
    parser.add_argument("--untied", dest="tied", action="store_false", help="own output matrix")
    parser.add_argument("--biases", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    options = vars(parse_arguments(arguments))
    path = options.pop("path")
    try:
        write_tiny_model(path, **options)
    except (OSError, ValueError) as error:
        print(f"make_tiny_model: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

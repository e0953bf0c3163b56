"""GGUF models as ONNX, in the folder layout of onnxruntime-genai."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ResourceError, UsageError
from ..formats.atomic_file import filling
from ..formats.metadata import TEMPLATE_KEY, TOOL_TEMPLATE_KEY, TOOL_TEMPLATE_NAME, quote
from ..formats.safetensors import is_onnx_model, is_safetensors_folder
from ..formats.split import open_model_file
from ..model_config import DecoderConfig
from ..models.reader import read_model
from ..onnx.config import FINGERPRINT_PROPERTY
from ..runners.native import NativeModelFile
from ..tokenizer import build_tokenizer
from ..tokenizer.chat_template import read_chat_template
from ..tokenizer.tokenizer_json import dump_tokenizer
from .decoder import DecoderExporter, ModelSource, check_exportable
from .onnx_writer import OnnxWriter

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

MODEL_NAME = "model.onnx"
DATA_NAME = "model.onnx.data"
CONFIG_NAME = "genai_config.json"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: bytes of the weights, and how many matrices are of each kind."""

    n_bytes: int
    quantized_matrices: int
    float_matrices: int


def export_model(
    path: Path,
    folder: Path,
    *,
    last_logits_only: bool = False,
    exporter: type[DecoderExporter] = DecoderExporter,
) -> ExportReport:
    """Writes the GGUF model at ``path`` as an ONNX model into ``folder``.

    ``last_logits_only``: logits of the last token alone, which is all that generation needs.

    What fails or is interrupted leaves nothing of it behind. Raises FormatError for a model that
    cannot be read or written as ONNX, UsageError for what is no GGUF file and for a folder that
    holds files already, ResourceError if it cannot be written.
    """
    if is_onnx_model(path):
        raise UsageError(f"{path}: is an ONNX model already; export-onnx takes a GGUF file")
    if is_safetensors_folder(path):
        raise UsageError(
            f"{path}: export-onnx takes a GGUF file; write one of the folder of safetensors with "
            "'edgeh2o quantize' and export that"
        )
    with NativeModelFile(path) as file, open_model_file(path) as gguf:
        config, bindings = read_model(gguf)
        check_exportable(config)
        keys = {"default": TEMPLATE_KEY, TOOL_TEMPLATE_NAME: TOOL_TEMPLATE_KEY}
        found = {name: read_chat_template(gguf.metadata.get(key)) for name, key in keys.items()}
        templates = {name: text for name, text in found.items() if text is not None}
        tokenizer = build_tokenizer(gguf.metadata)
        texts = dump_tokenizer(gguf.metadata, tokenizer, templates)
        texts[CONFIG_NAME] = _genai_config(config, tokenizer)
        try:
            with filling(folder) as create:
                source = ModelSource(gguf, bindings, file.load())
                data = create(DATA_NAME)
                writer = OnnxWriter(data, DATA_NAME)
                emitted = exporter(config, source, writer, last_logits_only=last_logits_only)
                emitted.emit()
                inputs, outputs = emitted.value_infos()
                writer.save(
                    create(MODEL_NAME),
                    inputs=inputs,
                    outputs=outputs,
                    opset=emitted.opset,
                    properties={FINGERPRINT_PROPERTY: config.fingerprint},
                )
                n_bytes = data.tell()
                for name, text in texts.items():
                    create(name).write(text.encode("utf-8"))
        except OSError as error:
            raise ResourceError(
                f"cannot write the model to {folder}: {error.strerror}; free some space"
            ) from None
    return ExportReport(n_bytes, emitted.n_quantized, emitted.n_float)


def _genai_config(config: DecoderConfig, tokenizer: Tokenizer) -> str:
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": MODEL_NAME,
        "head_size": config.head_dim,
        "hidden_size": config.model_dim,
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "num_key_value_heads": config.n_kv_heads,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    endings = sorted(tokenizer.eog_ids, key=lambda i: (i != tokenizer.eos_id, i))
    model: Mapping[str, Any] = {
        "type": "decoder" if config.architecture not in _GENAI_TYPES else config.architecture,
        "bos_token_id": _first(tokenizer.bos_id, tokenizer.eos_id, 0),
        "eos_token_id": endings or [0],
        "pad_token_id": _first(tokenizer.eos_id, 0),
        "context_length": config.context_length,
        "vocab_size": config.vocab_size,
        "decoder": decoder,
    }
    search = {"max_length": config.context_length, "past_present_share_buffer": True}
    return json.dumps({"model": model, "search": search}, indent=2)


# Names of `model.type` that onnxruntime-genai knows, of those that GGUF knows too.
_GENAI_TYPES = ("llama", "qwen2", "qwen3", "phi3", "granite", "gemma2", "olmo")


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def describe_report(report: ExportReport) -> str:
    """One line for people."""
    return (
        f"{quote(MODEL_NAME)}: {report.quantized_matrices} matrices in MatMulNBits, "
        f"{report.float_matrices} in float32, {report.n_bytes / 1e6:.0f} MB"
    )

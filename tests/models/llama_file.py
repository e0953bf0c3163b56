"""A small correct file of architecture ``llama``, and ways to spoil it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edgeh2o.formats.gguf import open_gguf
from edgeh2o.model_config import DecoderConfig
from edgeh2o.models import TensorBinding, read_model
from tests.formats import raw_gguf as raw

N_LAYERS, MODEL_DIM, N_HEADS, N_KV_HEADS, HEAD_DIM, FFN_DIM, VOCAB = 2, 16, 4, 2, 4, 24, 6
Q_DIM, KV_DIM = N_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM


def uint32(value: int) -> tuple[int, bytes]:
    return raw.UINT32, raw.u32(value)


def int64(value: int) -> tuple[int, bytes]:
    return raw.INT64, raw.scalar(raw.INT64, value)


def float32(value: float) -> tuple[int, bytes]:
    return raw.FLOAT32, raw.scalar(raw.FLOAT32, value)


def string(value: str) -> tuple[int, bytes]:
    return raw.STRING, raw.text(value)


def boolean(value: bool) -> tuple[int, bytes]:
    return raw.BOOL, raw.scalar(raw.BOOL, value)


def array(kind: int, values: list) -> tuple[int, bytes]:
    return raw.ARRAY, raw.array(kind, values)


KEYS: dict[str, tuple[int, bytes]] = {
    "general.architecture": string("llama"),
    "llama.block_count": uint32(N_LAYERS),
    "llama.context_length": uint32(512),
    "llama.embedding_length": uint32(MODEL_DIM),
    "llama.feed_forward_length": uint32(FFN_DIM),
    "llama.attention.head_count": uint32(N_HEADS),
    "llama.attention.head_count_kv": uint32(N_KV_HEADS),
    "llama.attention.layer_norm_rms_epsilon": float32(0.5**17),
    "tokenizer.ggml.tokens": array(raw.STRING, list("abcdef")),
}


def base_tensors() -> dict[str, raw.RawTensor]:
    tensors = {
        "token_embd.weight": raw.f32_tensor(MODEL_DIM, VOCAB),
        "output_norm.weight": raw.f32_tensor(MODEL_DIM),
    }
    for layer in range(N_LAYERS):
        shapes = {
            "attn_norm": (MODEL_DIM,),
            "attn_q": (MODEL_DIM, Q_DIM),
            "attn_k": (MODEL_DIM, KV_DIM),
            "attn_v": (MODEL_DIM, KV_DIM),
            "attn_output": (Q_DIM, MODEL_DIM),
            "ffn_norm": (MODEL_DIM,),
            "ffn_gate": (MODEL_DIM, FFN_DIM),
            "ffn_up": (MODEL_DIM, FFN_DIM),
            "ffn_down": (FFN_DIM, MODEL_DIM),
        }
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = raw.f32_tensor(*shape)
    return tensors


@dataclass(frozen=True, slots=True)
class Change:
    """What differs from the correct file: keys and tensors set (None removes one)."""

    keys: dict[str, tuple[int, bytes] | None] = field(default_factory=dict)
    tensors: dict[str, raw.RawTensor | None] = field(default_factory=dict)


def read(tmp_path: Path, change: Change) -> tuple[DecoderConfig, list[TensorBinding]]:
    keys = {**KEYS, **change.keys}
    tensors = {**base_tensors(), **change.tensors}
    path = tmp_path / "llama.gguf"
    path.write_bytes(
        raw.gguf_of(
            [raw.key(name, *value) for name, value in keys.items() if value is not None],
            {name: item for name, item in tensors.items() if item is not None},
        )
    )
    with open_gguf(path) as file:
        return read_model(file)

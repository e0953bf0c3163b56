"""Rows 15-17 and 20: hyperparameters and tensors that make no model, weights that are no numbers.

The finer tables of single keys and shapes are in tests/models.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgeh2o.cli.main import main
from tests.bad_input.refusal import Refusal, require_one_line
from tests.formats import raw_gguf as raw
from tests.models.llama_file import (
    FFN_DIM,
    HEAD_DIM,
    KEYS,
    KV_DIM,
    MODEL_DIM,
    N_LAYERS,
    VOCAB,
    array,
    base_tensors,
    float32,
    int64,
    string,
    uint32,
)
from tests.tiny_models import TinyModelFactory

ARCHITECTURE = "general.architecture"
BLOCKS, CONTEXT, WIDTH = "llama.block_count", "llama.context_length", "llama.embedding_length"
HEADS, KV_HEADS = "llama.attention.head_count", "llama.attention.head_count_kv"
KEY_LENGTH, ROTARY = "llama.attention.key_length", "llama.rope.dimension_count"
EPSILON, BASE = "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"
NAN, INFINITY = float32(math.nan), float32(math.inf)

# (row, key, value or None to leave it out, what the message says besides the key)
BAD_KEYS = [
    (15, ARCHITECTURE, None, "missing; convert the model again"),
    (15, ARCHITECTURE, string("no-such-family"), "not supported; supported: llama, .* more, which"),
    (15, ARCHITECTURE, string("qwen3vl-moe"), "not supported; supported: qwen3vlmoe, "),
    (15, ARCHITECTURE, uint32(1), "must be a string"),
    (15, BLOCKS, None, "missing"),
    (15, BLOCKS, float32(2.0), "a float, but must be an integer"),
    (15, BLOCKS, array(raw.UINT32, [2]), "array of 1 uint32 values"),
    (15, CONTEXT, string("512"), "a string, but must be an integer"),
    (15, EPSILON, None, "missing"),
    (15, EPSILON, uint32(1), "an integer, but must be a float"),
    (16, BLOCKS, uint32(0), "is 0, but must be"),
    (16, BLOCKS, uint32(513), "is 513, but must be"),
    (16, BLOCKS, uint32(2**31), "is 2147483648"),
    (16, BLOCKS, int64(-1), "is -1"),
    (16, HEADS, uint32(0), "is 0"),
    (16, KV_HEADS, uint32(0), "is 0"),
    (16, KV_HEADS, uint32(3), "' 3"),
    (16, KEY_LENGTH, uint32(0), "is 0"),
    (16, KEY_LENGTH, uint32(5), "even|dimension_count"),
    (16, KEY_LENGTH, uint32(2**31), "is 2147483648"),
    (16, WIDTH, uint32(0), "is 0"),
    (16, WIDTH, int64(2**62), "is 4611686018427387904"),
    (16, ROTARY, uint32(HEAD_DIM + 2), "at most the head size"),
    (16, ROTARY, uint32(2**31), "is 2147483648"),
    (16, EPSILON, float32(0.0), "is 0"),
    (16, EPSILON, NAN, "is nan"),
    (16, BASE, float32(0.0), "is 0"),
    (16, BASE, NAN, "is nan"),
    (16, BASE, INFINITY, "is inf"),
    (16, CONTEXT, uint32(0), "is 0"),
    (16, CONTEXT, uint32(2**31), "is 2147483648"),
]

# (tensor, its replacement or None to leave it out, what the message says besides the name)
BAD_TENSORS = [
    ("token_embd.weight", None, "missing"),
    ("blk.1.ffn_down.weight", None, "missing"),
    ("blk.0.attn_q.weight", raw.f32_tensor(MODEL_DIM, KV_DIM), "has shape"),
    ("blk.0.attn_k.weight", raw.f32_tensor(KV_DIM, MODEL_DIM), "has shape"),
    ("blk.0.ffn_up.weight", raw.f32_tensor(MODEL_DIM * FFN_DIM), "has shape"),
    ("token_embd.weight", raw.f32_tensor(MODEL_DIM, VOCAB + 1), "has shape"),
    ("output_norm.weight", raw.RawTensor((MODEL_DIM,), 26, bytes(4 * MODEL_DIM)), "type I32"),
    ("blk.0.ffn_gate.weight", raw.RawTensor((MODEL_DIM, FFN_DIM), 27, bytes(3072)), "type I64"),
    (f"blk.{N_LAYERS}.attn_q.weight", raw.f32_tensor(MODEL_DIM, MODEL_DIM), "does not use"),
    ("blk.0.attn_q.weight.lora_a", raw.f32_tensor(MODEL_DIM, 8), "does not use"),
]


def _write(path: Path, keys: dict, tensors: dict) -> list[str]:
    """A file with these changes; returns the command line that runs it."""
    all_keys = {**KEYS, **keys}
    all_tensors = {**base_tensors(), **tensors}
    path.write_bytes(
        raw.gguf_of(
            [raw.key(name, *value) for name, value in all_keys.items() if value is not None],
            {name: item for name, item in all_tensors.items() if item is not None},
        )
    )
    return ["run", str(path), "-p", "x"]


@pytest.mark.parametrize(("row", "name", "value", "problem"), BAD_KEYS)
def test_refuses_hyperparameters(
    tmp_path: Path,
    refusal: Refusal,
    row: int,
    name: str,
    value: tuple[int, bytes] | None,
    problem: str,
) -> None:
    command = _write(tmp_path / "model.gguf", {name: value}, {})
    refusal(command, code=1, problem=f"model.gguf: .*{name}.*({problem})")


@pytest.mark.parametrize(("name", "item", "problem"), BAD_TENSORS)
def test_row_17_refuses_tensors(
    tmp_path: Path, refusal: Refusal, name: str, item: raw.RawTensor | None, problem: str
) -> None:
    command = _write(tmp_path / "model.gguf", {}, {name: item})
    refusal(command, code=1, problem=f"model.gguf: .*({problem}.*'{name}'|'{name}.*{problem})")


def test_a_vocabulary_alone_is_named_as_such(tmp_path: Path, refusal: Refusal) -> None:
    command = _write(tmp_path / "model.gguf", {}, dict.fromkeys(base_tensors()))
    refusal(command, code=1, problem="no weights, as those that hold a vocabulary alone; fetch")


def test_row_19_a_name_with_control_characters(
    tmp_path: Path, tiny_model: TinyModelFactory, refusal: Refusal
) -> None:
    """Messages reach a terminal; this one also names the file."""
    path = tmp_path / "hostile.gguf"
    content = tiny_model(tensor_type="Q4_0").read_bytes()
    assert content.count(b"smollm") == 1
    path.write_bytes(content.replace(b"smollm", b"s\x1b[2Jm"))
    refusal(
        ["run", str(path), "-p", "x"],
        code=1,
        problem=r"hostile.gguf: unknown pre-tokenizer 's\\x1b\[2Jm' \(tokenizer.ggml.pre\)",
        max_python_bytes=16 * 2**20,
    )
    name = "no\x1b[2Jsuch.gguf"
    refusal(["run", name, "-p", "x"], code=1, problem=r"no\\x1b\[2Jsuch.gguf: no such file")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_row_20_weights_that_are_not_finite(
    tmp_path: Path,
    tiny_model: TinyModelFactory,
    capsys: pytest.CaptureFixture[str],
    refusal: Refusal,
    value: float,
) -> None:
    """``--check-tensors`` names the tensor; without it they show at the first token."""
    path = tmp_path / "damaged.gguf"
    content = bytearray(tiny_model(tensor_type="F16").read_bytes())
    (tensor,) = (
        t
        for t in gguf.GGUFReader(tiny_model(tensor_type="F16")).tensors
        if t.name == "blk.1.attn_output.weight"
    )
    weights = np.full(tensor.n_elements, value, dtype="<f2").tobytes()
    content[tensor.data_offset : tensor.data_offset + len(weights)] = weights
    path.write_bytes(content)
    refusal(
        ["run", str(path), "-p", "x", "--check-tensors"],
        code=1,
        problem="damaged.gguf: .*'blk.1.attn_output.weight'.*(NaN|nan|inf)",
        max_python_bytes=16 * 2**20,
    )
    refusal(
        ["inspect", str(path), "--check-tensors"],
        code=1,
        problem="damaged.gguf: .*'blk.1.attn_output.weight'.*(NaN|nan|inf)",
        max_python_bytes=16 * 2**20,
    )
    assert main(["run", str(path), "-p", "the thing", "-n", "2"]) == 1
    captured = capsys.readouterr()
    require_one_line(captured.err)
    assert "no token can be drawn" in captured.err
    assert "the model file may be damaged" in captured.err

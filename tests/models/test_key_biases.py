"""Layers whose biases of keys are too large for products in 8 bits are found in the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import gguf
import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.models.key_biases import BLOCK_KEYS, LARGE_LOGIT, mark_key_biases
from edgeh2o.models.reader import read_model
from edgeh2o.runners.base import SessionShape
from edgeh2o.runners.native import NativeModelFile
from tests.tiny_models import TinyModelFactory, with_vectors

if TYPE_CHECKING:
    from edgeh2o.formats.gguf_header import TensorInfo
    from edgeh2o.formats.model_tensors import ModelTensors

HEAD_DIM = 32


def marked(path: Path) -> list[bool]:
    with NativeModelFile(path) as file:
        return [layer.has_large_keys for layer in file.config.layers]


@pytest.mark.parametrize(
    ("dims", "size", "expected"),
    [
        ((1, 17), 60.0, True),  # of a pair that turns by 0.56 per position
        ((1, 17), 2.0, False),
        ((15, 31), 60.0, False),  # hardly turns: a block's mean key holds it
    ],
)
def test_what_a_block_leaves_of_biases_counts(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    dims: tuple[int, ...],
    size: float,
    expected: bool,
) -> None:
    q, k = np.zeros((8, HEAD_DIM), "f4"), np.zeros((2, HEAD_DIM), "f4")
    q[4:, dims] = k[1, dims] = size  # of the second KV head and its group
    path = with_vectors(
        tiny_model(architecture="qwen2", n_layers=2),
        tmp_path / "m.gguf",
        {"blk.1.attn_q.bias": q.ravel(), "blk.1.attn_k.bias": k.ravel()},
    )
    assert marked(path) == [False, expected]
    with NativeModelFile(path) as file:
        config = file.config
        turn = np.multiply.outer(np.arange(BLOCK_KEYS), config.rope_inv_freq)
    rotated = (k[1, :16] + 1j * k[1, 16:]) * np.exp(1j * turn)
    left = np.linalg.norm(rotated - rotated.mean(0), axis=1)
    logit = config.attention_scale * np.linalg.norm(q[4]) * np.sqrt(np.square(left).mean())
    assert (logit > LARGE_LOGIT) == expected


def test_one_vector_for_all_three(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    source = tiny_model(architecture="phi2", is_fused=True, n_layers=2)
    (tensor,) = (t for t in gguf.GGUFReader(source).tensors if t.name == "blk.0.attn_qkv.bias")
    assert marked(source) == [False, False]
    path = with_vectors(
        source, tmp_path / "m.gguf", {tensor.name: np.full(tensor.data.shape, 60.0, "f4")}
    )
    assert marked(path) == [True, False]


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0"])
def test_types_of_vectors(tiny_model: TinyModelFactory, type_name: str) -> None:
    """Biases of other types, which files do not have, count as none."""

    class Stored:
        def tensor_bytes(self, info: TensorInfo) -> bytes:
            values = np.full(info.cols, 60.0, "f4")
            if info.type_name == "BF16":
                return (values.view("u4") >> 16).astype("u2").tobytes()
            return values.astype("f2" if info.type_name == "F16" else "f4").tobytes()

    with NativeModelFile(tiny_model(architecture="qwen2", n_layers=2)) as file:
        config, bindings = read_model(file._gguf)
    bindings = [
        replace(item, info=replace(item.info, type_name=type_name))
        for item in bindings
        if item.name.endswith(".bias")
    ]
    marked = mark_key_biases(config, cast("ModelTensors", Stored()), bindings)
    assert [layer.has_large_keys for layer in marked.layers] == 2 * [type_name != "Q8_0"]


def test_models_without(tiny_model: TinyModelFactory) -> None:
    with NativeModelFile(tiny_model(n_layers=2)) as file:
        assert not file.config.has_key_bias
        assert not any(layer.has_large_keys for layer in file.config.layers)


def test_such_a_layer_takes_exact_products(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    """With all layers marked the logits are those of products in f32."""
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    q, k = np.zeros((8, HEAD_DIM), "f4"), np.zeros((2, HEAD_DIM), "f4")
    q[:, 1] = k[:, 1] = 60.0
    biases = {"q": q.ravel(), "k": k.ravel()}
    path = with_vectors(
        tiny_model(architecture="qwen2", n_layers=2),
        tmp_path / "m.gguf",
        {f"blk.{i}.attn_{part}.bias": biases[part] for i in range(2) for part in "qk"},
    )
    assert marked(path) == [True, True]
    rows = {}
    with NativeModelFile(path) as file:
        model = file.load()
    for precision in ("f32", "int8"):
        shape = SessionShape(
            max_context=256,
            batch_size=256,
            chunk_size=64,
            cache_type="f16",
            threads=1,
            precision=precision,
        )
        runner = model.start_session(DenseConfig(), shape)
        tokens = np.arange(3, 203, dtype=np.int32)
        rows[precision] = runner.prefill(tokens, is_last=True)
    assert np.array_equal(rows["f32"], rows["int8"])

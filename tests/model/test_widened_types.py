"""Types that are held as larger ones: the weights are exactly those of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgeh2o import LLM, SamplingParams, _core
from edgeh2o.errors import FormatError
from edgeh2o.formats.gguf import open_gguf
from edgeh2o.formats.gguf_header import TensorInfo
from edgeh2o.formats.gguf_types import TENSOR_TYPES, stored_bytes
from edgeh2o.formats.gguf_writer import write_gguf
from edgeh2o.runners.native import NativeModelFile, check_tensors
from tests.tiny_models import TinyModelFactory

TYPES = {item.name: item for item in TENSOR_TYPES.values()}
HELD = _core.widened_types()


def random_blocks(kind: str, n_values: int, seed: int = 0) -> NDArray[np.uint8]:
    """[blocks, bytes] of any bits, but for scales: f16 of about 1e-3, and no NaN of NVFP4."""
    item = TYPES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n_values // item.block_size, item.block_bytes), np.uint8)
    if kind == "NVFP4":
        blocks[:, :4] &= 0x3F
        return blocks
    # Subnormal ones among them.
    scales = (1e-3 * 0.3 ** rng.integers(0, 9, len(blocks))).astype("<f2")
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


def decode(blocks: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    if kind in ("IQ3_S", "NVFP4"):
        return dequantize(blocks, GGMLQuantizationType[kind]).astype(np.float32)
    d = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
    if kind == "Q1_0":
        return d * (2 * bits - 1)
    assert kind == "Q2_0"
    return d * (bits[:, 0::2] + 2 * bits[:, 1::2] - 1)


@pytest.mark.parametrize("kind", HELD)
def test_weights_are_those_of_the_file(kind: str) -> None:
    rows, cols = 3, 512
    blocks = random_blocks(kind, rows * cols)
    data, bad = _core.convert_rows(blocks.tobytes(), kind, "F32", rows, cols)
    assert bad is None
    ours = np.frombuffer(data, np.float32)
    np.testing.assert_array_equal(ours, decode(blocks, kind).ravel())
    assert len(np.unique(ours)) > 3


def rewrite(model: Path, out: Path, kind: str) -> Path:
    """The model with random matrices of a type in its feed-forward networks."""
    with open_gguf(model) as gguf:
        infos = [
            TensorInfo(name, kind, info.shape, stored_bytes(kind, info.rows * info.cols), 0)
            if ".ffn_" in name and len(info.shape) > 1
            else info
            for name, info in gguf.tensors.items()
        ]

        def read(info: TensorInfo) -> list[bytes]:
            original = gguf.tensors[info.name]
            if info.type_name == original.type_name:
                return [bytes(gguf.tensor_bytes(original))]
            return [random_blocks(kind, info.rows * info.cols, len(info.name)).tobytes()]

        metadata = {key: gguf.metadata.stored(key) for key in gguf.metadata}
        write_gguf(out, metadata, infos, read)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("kind", HELD)
def test_a_model_answers_as_one_of_the_type_it_is_held_in(
    tiny_model: TinyModelFactory, tmp_path: Path, kind: str
) -> None:
    low = rewrite(tiny_model(), tmp_path / "low.gguf", kind)
    answer = LLM(low).generate("the", SamplingParams(temperature=0, max_tokens=4), logprobs=True)
    assert np.isfinite(answer.logprobs).all()
    with NativeModelFile(low) as file:
        model = file.load()
        bits = {name: 8 * item.block_bytes / item.block_size for name, item in TYPES.items()}
        n_values = 3 * 3 * 256 * 512
        others = sum(info.n_bytes for info in file.tensors if ".ffn_" not in info.name)
        norms = 3 * 256 * 4
        assert file.n_weight_bytes == others + norms + n_values * bits[HELD[kind]] / 8
        weights = model.dequantize("blk.1.ffn_up.weight")
    expected = decode(random_blocks(kind, weights.size, len("blk.1.ffn_up.weight")), kind)
    np.testing.assert_array_equal(weights.ravel(), expected.ravel())


def test_scales_that_are_no_numbers_are_found_where_they_are(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    path = rewrite(tiny_model(), tmp_path / "low.gguf", "Q1_0")
    with open_gguf(path) as gguf:
        offset = gguf.tensors["blk.1.ffn_down.weight"].offset + 18 * (4 * 7 + 2)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x00\x7e")
    with open_gguf(path) as gguf, pytest.raises(FormatError, match="row 7, block 2 of type Q1_0"):
        check_tensors(gguf)


@pytest.mark.parametrize("kind", ["IQ1_S", "IQ2_XXS", "IQ3_XXS", "TQ1_0"])
def test_types_that_cannot_be_read_are_refused_by_name(
    tiny_model: TinyModelFactory, tmp_path: Path, kind: str
) -> None:
    path = rewrite(tiny_model(), tmp_path / "low.gguf", kind)
    with pytest.raises(FormatError, match=rf"is of type {kind}, .* fetch the model in one of"):
        NativeModelFile(path)

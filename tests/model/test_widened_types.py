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
from edgeh2o.runners.native import NativeModelFile
from edgeh2o.runners.tensor_checks import check_tensors
from tests.model.model_pair import random_tokens, relative_error
from tests.random_blocks import MIXED, random_blocks, rewrite
from tests.reference.decoder import ReferenceDecoder
from tests.reference.dense import DenseLayer
from tests.tiny_models import TinyModelFactory

HELD = _core.widened_types()


def decode(blocks: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    if kind.startswith(("IQ", "TQ")) or kind == "NVFP4":
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


@pytest.mark.parametrize("kind", HELD)
def test_a_model_answers_as_one_of_the_type_it_is_held_in(
    tiny_model: TinyModelFactory, tmp_path: Path, kind: str
) -> None:
    low = rewrite(tiny_model(), tmp_path / "low.gguf", {".ffn_": kind})
    answer = LLM(low).generate("the", SamplingParams(temperature=0, max_tokens=4), logprobs=True)
    assert np.isfinite(answer.logprobs).all()
    with NativeModelFile(low) as file:
        model = file.load()
        n_values = 3 * 3 * 256 * 512
        others = sum(info.n_bytes for info in file.tensors if ".ffn_" not in info.name)
        norms = 3 * 256 * 4
        block_values, block_bytes = HELD[kind]
        assert file.n_weight_bytes == others + norms + n_values // block_values * block_bytes
        assert model.weight_bytes <= file.n_weight_bytes + 2**18
        weights = model.dequantize("blk.1.ffn_up.weight")
    expected = decode(random_blocks(kind, weights.size, len("blk.1.ffn_up.weight")), kind)
    np.testing.assert_array_equal(weights.ravel(), expected.ravel())


def test_types_mixed_in_a_file_are_its_weights(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    """The same logits as of the weights that the gguf package decodes, but for rounded rows."""
    path = rewrite(tiny_model(n_layers=2), tmp_path / "mixed.gguf", MIXED)
    tokens = random_tokens(40)
    exact = ReferenceDecoder.from_gguf(path).start(DenseLayer).prefill(tokens)
    with NativeModelFile(path) as file:
        core = file.load()._core_model
    session = _core.Sequence(
        core, _core.dense_policy(), max_context=64, batch_size=64, chunk_size=64
    )
    assert relative_error(session.prefill(tokens, is_last=True), exact[-1]) < 0.05


def test_scales_that_are_no_numbers_are_found_where_they_are(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    path = rewrite(tiny_model(), tmp_path / "low.gguf", {".ffn_": "Q1_0"})
    with open_gguf(path) as gguf:
        offset = gguf.tensors["blk.1.ffn_down.weight"].offset + 18 * (4 * 7 + 2)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x00\x7e")
    with open_gguf(path) as gguf, pytest.raises(FormatError, match="row 7, block 2 of type Q1_0"):
        check_tensors(gguf)


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K"])
def test_types_that_cannot_be_read_are_refused_by_name(
    tiny_model: TinyModelFactory, tmp_path: Path, kind: str
) -> None:
    path = rewrite(tiny_model(), tmp_path / "low.gguf", {".ffn_": kind})
    with pytest.raises(FormatError, match=rf"is of type {kind}, .* fetch the model in one of"):
        NativeModelFile(path)

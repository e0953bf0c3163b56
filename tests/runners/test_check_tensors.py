"""NaN and infinite weights: found in every tensor type, named, and looked for only on request."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o import LLM, _core
from edgeh2o.cli.main import main
from edgeh2o.errors import FormatError
from edgeh2o.formats.gguf import open_gguf
from tests.tiny_models import TinyModelFactory

HALF_INFINITY, HALF_NAN, HALF_LARGEST = (
    np.array([value], np.float16).view(np.uint8) for value in (np.inf, np.nan, -65504)
)
# Where in a block the float16 numbers lie.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "F16"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def zeros(type_name: str, n_blocks: int) -> np.ndarray:
    """Blocks [n, bytes] of finite weights whose quants are all ones, to be no scale by chance."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1]
    blocks = np.full((n_blocks, size), 0xFF, np.uint8)
    for offset in SCALES.get(type_name, (0,)):
        blocks[:, offset : offset + 2] = HALF_LARGEST
    return blocks


def test_every_type_of_the_core_is_checked() -> None:
    assert {*SCALES, "F32", "BF16", "MXFP4"} == set(_core.supported_types())


@given(data=st.data())
def test_the_first_bad_scale_is_found(data: st.DataObject) -> None:
    type_name = data.draw(st.sampled_from(sorted(SCALES)))
    n_blocks = data.draw(st.integers(1, 9))
    blocks = zeros(type_name, n_blocks)
    assert _core.find_bad_block(blocks.ravel(), type_name) is None
    bad = data.draw(st.sets(st.integers(0, n_blocks - 1), min_size=1))
    for index in bad:
        offset = data.draw(st.sampled_from(SCALES[type_name]))
        blocks[index, offset : offset + 2] = data.draw(st.sampled_from([HALF_INFINITY, HALF_NAN]))
    assert _core.find_bad_block(blocks.ravel(), type_name) == min(bad)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_floats_are_found(value: float) -> None:
    values = np.full(40, np.finfo(np.float32).max)
    assert _core.find_bad_block(values.view(np.uint8), "F32") is None
    values[17] = value
    assert _core.find_bad_block(values.view(np.uint8), "F32") == 17
    upper_halves = values.view(np.uint16)[1::2].copy()
    upper_halves[:17] = 0x7F7F
    assert _core.find_bad_block(upper_halves[:17].view(np.uint8), "BF16") is None
    assert _core.find_bad_block(upper_halves.view(np.uint8), "BF16") == 17


@pytest.mark.parametrize(
    ("exponent", "pair", "is_bad"),
    [
        (252, 0x77, False),  # 12 * 2^124
        (253, 0x55, False),  # 6 * 2^125
        (253, 0x50, False),
        (253, 0xE5, True),  # -8 * 2^125 is beyond float32
        (254, 0x04, True),  # and so is 4 * 2^126
        (255, 0x00, True),
    ],
)
def test_shared_exponents(exponent: int, pair: int, is_bad: bool) -> None:
    blocks = np.full((3, 17), pair, np.uint8)
    blocks[:, 0] = [0, exponent, 127]
    found = _core.find_bad_block(blocks.ravel(), "MXFP4")
    with np.errstate(over="ignore"):
        decoded = gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    if exponent < 255:  # which the gguf package reads as 2^127
        assert is_bad == (not np.isfinite(decoded).all())
    assert found == (1 if is_bad else None)


def test_data_that_is_not_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes are not whole Q4_0 blocks of 18"):
        _core.find_bad_block(bytes(17), "Q4_0")


def test_a_model_with_a_bad_block_is_refused_on_request(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tiny_model(tensor_type="Q8_0")
    LLM(good, check_tensors=True).close()
    with open_gguf(good) as file:
        info = file.tensors["blk.1.ffn_up.weight"]
    content = bytearray(good.read_bytes())
    blocks_per_row = info.cols // 32
    start = info.offset + 34 * (5 * blocks_per_row + 3)
    content[start : start + 2] = HALF_NAN.tobytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    LLM(bad).close()
    message = r"'blk.1.ffn_up.weight' has a NaN or infinite weight in row 5, block 3 of type Q8_0"
    with pytest.raises(FormatError, match=message):
        LLM(bad, check_tensors=True)
    assert main(["run", str(bad), "-p", "a", "--check-tensors"]) == 1
    assert "blk.1.ffn_up.weight" in capsys.readouterr().err

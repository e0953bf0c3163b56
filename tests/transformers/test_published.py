"""Folders as transformers saves them answer as in transformers (tools/update_folder_goldens.py)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgeh2o.errors import FormatError
from edgeh2o.export.gguf import quantize_model
from edgeh2o.models.transformers.families import FAMILIES
from edgeh2o.models.transformers.weights import open_transformers
from edgeh2o.runners.native import NativeModelFile
from edgeh2o.runners.safetensors import SafetensorsModelFile
from tests.transformers.published_cases import CASES, CHUNK, log_probabilities, write_case

from .published import read_published, write_published
from .safetensors_files import read_safetensors, write_safetensors

# Of models whose Q, K and V lie otherwise there, and that have rows of whole blocks.
QUANTISED_CASES = [
    name for name in CASES if re.match("phi|gpt_neox|falcon(?!_h1)|bloom|olmo", name)
]
MAX_KL, MAX_DIFFERENCE = 1e-9, 1e-3  # nats
# Their GELU has an error function, where ours has a hyperbolic tangent.
ERF_CASES = ("gpt_neox_erf", "falcon_erf", "mpt_erf", "mpt_erf_limited")
MAX_ERF_KL, MAX_ERF_DIFFERENCE = 2e-7, 5e-3
FP4_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def load(folder: Path) -> None:
    with SafetensorsModelFile(folder, "f32") as file:
        file.load()


def divergence(expected: NDArray[np.float32], actual: NDArray[np.float64]) -> float:
    exact = expected.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))  # which rounding has moved from 0
    return float((np.exp(exact) * (exact - actual)).sum(axis=-1).mean())


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_transformers(
    tokenizer_folder: Path, tmp_path: Path, name: str
) -> None:
    case = read_published(name)
    assert len(case.tokens) > 3 * CHUNK and case.text_config["model_type"] in FAMILIES
    write_case(tmp_path / name, case, tokenizer_folder)
    file = SafetensorsModelFile(tmp_path / name, "f32")
    actual = log_probabilities(file, case.tokens)[case.positions]
    expected = case.log_probabilities
    assert expected.std() > 0.3
    has_erf = name in ERF_CASES
    atol = MAX_ERF_DIFFERENCE if has_erf else MAX_DIFFERENCE
    np.testing.assert_allclose(actual, expected, atol=atol)
    assert abs(divergence(expected, actual)) < (MAX_ERF_KL if has_erf else MAX_KL)


@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "f32") for name in CASES), *((name, "q8_0") for name in QUANTISED_CASES)],
)
def test_a_gguf_file_of_it_is_the_same_model(
    tokenizer_folder: Path, tmp_path: Path, name: str, target: str
) -> None:
    case = read_published(name)
    write_case(tmp_path / name, case, tokenizer_folder)
    quantize_model(tmp_path / name, tmp_path / "out.gguf", target)
    of_file = log_probabilities(NativeModelFile(tmp_path / "out.gguf"), case.tokens)
    of_folder = log_probabilities(SafetensorsModelFile(tmp_path / name, target), case.tokens)
    np.testing.assert_array_equal(of_file, of_folder)


@pytest.mark.parametrize("name", CASES)
def test_tensors_that_are_missing_or_left_over_are_named(
    tokenizer_folder: Path, tmp_path: Path, name: str
) -> None:
    case = read_published(name)
    folder = tmp_path / name
    write_case(folder, case, tokenizer_folder)
    whole = dict(case.shapes)
    of_texts = [each for each in whole if "vision" not in each and "visual" not in each]
    layers = [re.search(r"\.(\d+)\.", each) for each in of_texts]
    last = max(int(found[1]) for found in layers if found)
    for number, missing in enumerate(each for each in of_texts if f".{last}." in each):
        shapes = {each: shape for each, shape in whole.items() if each != missing}
        if missing.endswith("bias") or number % 3:
            continue
        write_published(folder, case.config, shapes)
        with pytest.raises(FormatError, match=r"missing|does not use"):
            load(folder)
    write_published(folder, case.config, {**whole, "model.layers.0.more.weight": (2, 2)})
    with pytest.raises(FormatError, match=r"'model\.layers\.0\.more\.weight'"):
        load(folder)
    config = {**case.config, "more_multiplier": 2.0}
    if "text_config" in config:
        config["text_config"] = {**case.text_config, "more_multiplier": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"'more_multiplier' is not known"):
        load(folder)


def test_blocks_of_mxfp4_are_taken_as_they_are(tokenizer_folder: Path, tmp_path: Path) -> None:
    """A byte has two neighbours, the first in its low half; scales are powers of two."""
    case, folder = read_published("gpt_oss"), tmp_path / "gpt_oss"
    write_case(folder, case, tokenizer_folder)
    rng, stored = np.random.default_rng(0), read_safetensors(folder / "model.safetensors")
    weights: dict[str, NDArray[np.float64]] = {}
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        n_experts, n_in, n_out = stored.pop(name).shape
        blocks = rng.integers(0, 256, (n_experts, n_out, n_in // 32, 16), np.uint8)
        scales = rng.integers(120, 125, blocks.shape[:3], np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], 32)
        values = FP4_VALUES[codes & 7] * np.where(codes & 8, -1.0, 1.0)
        exact = values * 2.0 ** (scales[..., None].astype(int) - 127)
        weights[name] = exact.reshape(n_experts, n_out, n_in)
    write_safetensors(folder / "model.safetensors", stored, "F32")
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = {**case.config, "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(config))
    with open_transformers(folder, "q8_0") as converted:
        assert sum(info.type_name == "MXFP4" for info in converted.tensors.values()) == 3 * 4
        for layer in range(4):
            both = weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
            down = weights[f"model.layers.{layer}.mlp.experts.down_proj"]
            for part, exact in (("gate", both[:, ::2]), ("up", both[:, 1::2]), ("down", down)):
                info = converted.tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
                rows = np.frombuffer(converted.tensor_bytes(info), np.uint8).reshape(info.rows, -1)
                actual = dequantize(rows, GGMLQuantizationType.MXFP4)
                np.testing.assert_array_equal(actual, exact.reshape(actual.shape))
    load(folder)
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(FormatError, match=r"quantised already \('gptq'\)"):
        load(folder)
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    write_safetensors(folder / "model.safetensors", stored, "F32")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        FormatError, match=r"down_proj_blocks' .* which are not the blocks of MXFP4"
    ):
        load(folder)


@pytest.mark.parametrize("name", ["gemma3", "olmo", "lfm2", "gpt_neox"])
def test_a_tied_output_is_what_is_stored(tokenizer_folder: Path, tmp_path: Path, name: str) -> None:
    """As transformers 5 takes it: of two matrices that differ each is what it is called."""
    case, folder = read_published(name), tmp_path / name
    write_case(folder, case, tokenizer_folder)
    ties = {"tie_word_embeddings": True}
    config = {**case.config, **ties}
    if "text_config" in config:
        config["text_config"] = {**case.text_config, **ties}
    stored = read_safetensors(folder / "model.safetensors")
    output = {"gemma3": "lm_head", "gpt_neox": "embed_out"}.get(name, "lm_head") + ".weight"
    embedding = next(each for each in stored if "embed" in each and each != output)
    stored.pop(output, None)

    def rows(tensors: dict[str, NDArray[np.float32]], **settings: object) -> NDArray[np.float64]:
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        write_safetensors(folder / "model.safetensors", tensors, "F32")
        return log_probabilities(SafetensorsModelFile(folder, "f32"), case.tokens)

    tied = rows(stored)
    np.testing.assert_array_equal(rows({**stored, output: stored[embedding]}), tied)
    moved = {each: values for each, values in stored.items() if each != embedding}
    np.testing.assert_array_equal(rows({**moved, output: stored[embedding]}), tied)
    other = np.roll(stored[embedding], 1, axis=0)
    own = rows({**stored, output: other})
    # Its last token is the first of the embedding.
    np.testing.assert_allclose(own, np.roll(tied, 1, axis=1), atol=1e-5)
    with pytest.raises(FormatError, match=rf"'{output}' is missing, and 'tie_word"):
        rows(stored, tie_word_embeddings=False)

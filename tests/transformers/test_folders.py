"""Folders of safetensors give the model that a GGUF file of the same weights gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, SamplingParams
from edgeh2o.errors import FormatError
from edgeh2o.formats.split import open_model_file
from edgeh2o.models.reader import read_model
from edgeh2o.models.transformers.families import FAMILIES
from edgeh2o.models.transformers.weights import open_transformers
from tests.tiny_models import TinyModelFactory

from .folders import CASES, MODEL_TYPES, options_of, write_folder
from .published import read_published
from .published_cases import CASES as PUBLISHED


def test_every_family_has_a_case() -> None:
    cases = {MODEL_TYPES[str(options_of(case)["architecture"])] for case in CASES}
    published = {read_published(case).text_config["model_type"] for case in PUBLISHED}
    assert cases | {"mistral", "olmo3"} | published == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_tensors_and_settings_are_those_of_the_gguf_file(
    tiny_model: TinyModelFactory, tmp_path: Path, case: str
) -> None:
    model = tiny_model(**options_of(case))
    folder = write_folder(model, tmp_path / "tiny", n_files=2)
    with open_model_file(model) as gguf, open_transformers(folder, "f32") as converted:
        expected, ours = read_model(gguf)[0], read_model(converted)[0]
        assert set(converted.tensors) == set(gguf.tensors)
        is_gemma = case.startswith("gemma")
        for name, info in gguf.tensors.items():
            other = converted.tensors[name]
            assert (other.shape, other.type_name) == (info.shape, "F32")
            values = np.frombuffer(converted.tensor_bytes(other), np.float32)
            original = np.frombuffer(gguf.tensor_bytes(info), np.float32)
            # Subtracting the 1 of Gemma's norms rounds.
            np.testing.assert_allclose(values, original, rtol=0, atol=1e-7 if is_gemma else 0)
    assert replace(ours, fingerprint=expected.fingerprint) == expected
    assert ours.fingerprint == expected.fingerprint or is_gemma


@pytest.mark.parametrize("target", ["q8_0", "q4_k_m"])
def test_answers_are_those_of_a_quantised_file(
    tiny_model: TinyModelFactory, tmp_path: Path, target: str
) -> None:
    model = tiny_model(architecture="llama", tied=False)
    folder = write_folder(model, tmp_path / "tiny", dtype="BF16", n_files=3, has_index=False)
    prompt, sampling = "the other way in", SamplingParams(temperature=0, max_tokens=8)
    with LLM(folder, quantize=target) as llm:
        answer = llm.generate(prompt, sampling, logprobs=True)
        messages = [{"role": "user", "content": "Hello"}]
        assert llm.chat(messages, sampling).text  # by chat_template.jinja
        assert llm.tokenize(prompt) == LLM(model).tokenize(prompt)
    assert len(answer.token_ids) == 8


@pytest.mark.parametrize(
    ("model_type", "architecture", "is_needed"),
    [("mistral", "llama", False), ("olmo3", "olmo2", True)],
)
def test_others_have_windows(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    model_type: str,
    architecture: str,
    is_needed: bool,
) -> None:
    model = tiny_model(architecture=architecture, sliding_window=48, rope_base=500000.0)
    folder = write_folder(model, tmp_path / "tiny")
    config = {**json.loads((folder / "config.json").read_text()), "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    with open_model_file(model) as gguf, open_transformers(folder, "f32") as converted:
        ours, expected = read_model(converted)[0], read_model(gguf)[0]
    assert ours == expected and ours.layers[0].window == 48
    if is_needed:  # transformers has a width of its own where there is none
        del config["sliding_window"]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match=r"'sliding_window' is missing"):
            open_transformers(folder, "f32")

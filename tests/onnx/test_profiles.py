"""Budget tables of ONNX models: what their attention shows is what that of a GGUF file shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeh2o import SamplingParams
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.attention.kept_profiles import PROFILE_TOKENS
from edgeh2o.cli.main import main
from edgeh2o.engine.calibration import measure_head_errors
from edgeh2o.export.onnx import MODEL_NAME
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.editing import SMALL, copy_folder, edited, find_node
from tests.onnx.exported import unpack
from tests.onnx.reading import make_tokens, open_llm
from tests.onnx.variants import BiasedMultiHead, GroupQuery, HeadMajorAttention, Packed
from tests.tiny_models import TinyModelFactory

LONG: dict[str, Any] = {**SMALL, "context_length": 4096}


def _errors(model: Any, n_tokens: int = 200) -> np.ndarray:
    return measure_head_errors(
        model,
        make_tokens(n_tokens),
        levels=(8, 32),
        threads=1,
        first_query=64,
        rule=HeadwiseConfig(local=8),
        chunk_size=16,
    ).errors


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("variant", [GroupQuery, Packed, BiasedMultiHead, HeadMajorAttention])
def test_errors_are_those_of_the_gguf_file(
    onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory, variant: Any, tensor_type: str
) -> None:
    options = {**SMALL, "n_kv_heads": 4, "tensor_type": tensor_type}
    with open_llm(onnx_model(variant, **options)) as ours, open_llm(tiny_model(**options)) as own:
        assert ours.model.shows_attention
        found, expected = _errors(ours.model), _errors(own.model)
    assert (expected > 0).all()
    np.testing.assert_allclose(found, expected, rtol=2e-3 if tensor_type == "F32" else 0.3)


@pytest.mark.parametrize(
    ("name", "is_shown"),
    [
        ("builder_llama_fp16", True),
        ("builder_llama_int8", True),
        ("builder_gemma2_int4", True),
        ("dynamo_llama_23", True),
        ("optimum_qwen2_14", True),
        ("builder_gpt_oss_fp32", False),  # its heads have sinks
    ],
)
def test_of_exporters(name: str, is_shown: bool, tmp_path: Path) -> None:
    folder, _ = unpack(name, tmp_path / name)
    with open_llm(folder) as llm:
        assert llm.model.shows_attention == is_shown
        if is_shown:
            errors = _errors(llm.model).reshape(2, -1)
            has_window = [site.window > 0 for site in llm.model.decoder.sites]  # type: ignore[attr-defined]
            np.testing.assert_array_equal((errors > 0).any(axis=1), np.logical_not(has_window))


def test_a_prompt_is_profiled(
    onnx_model: OnnxModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first long prompt makes a profile, by which the next is read sparse."""
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path))
    tokens = make_tokens(2 * PROFILE_TOKENS + 64).tolist()
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    folder = onnx_model(**LONG)
    tables = []
    for _ in range(2):
        with open_llm(folder, attention=HeadwiseConfig(), prefill=None) as llm:
            tables.append(llm.generate(tokens, one).stats.attention["table"])
    assert tables == ["profile (1 prompt)", "profile (1 prompt)"]


def test_what_is_not_shown_cannot_be_calibrated(
    onnx_model: OnnxModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A product between the attention and the residual stream that is not known."""
    folder = copy_folder(onnx_model(**LONG), tmp_path / "model")
    with edited(folder) as model:
        attended = find_node(model, "GroupQueryAttention").output[0]
        for node in model.graph.node:
            node.input[:] = ["scaled" if name == attended else name for name in node.input]
        node = onnx.helper.make_node("Abs", [attended], ["scaled"])
        model.graph.node.append(node)
    assert (folder / MODEL_NAME).exists()
    assert main(["calibrate", str(folder)]) == 2
    assert "GGUF" in capsys.readouterr().err

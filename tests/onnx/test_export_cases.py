"""What `export-onnx` writes gives, run whole by onnxruntime, the logits of the GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from edgeh2o.errors import FormatError
from edgeh2o.export.onnx import MODEL_NAME, export_model
from tests.model.golden_cases import CASES, CONTEXT, options_of
from tests.onnx.conftest import OnnxModelFactory
from tests.onnx.reading import BATCH_SIZE, Uncut, make_tokens, open_llm
from tests.tiny_models import TinyModelFactory

TOLERANCE = 1e-4  # in standard deviations of the logits
EXPORTED = (
    *("llama", "llama_biases_untied", "llama_linear", "llama_llama3", "llama_yarn", "nanbeige"),
    *("qwen2", "qwen2_yarn", "qwen3", "qwen2vl", "qwen3vl", "ernie4_5", "exaone"),
    *("baichuan", "xverse"),
    *(
        "exaone4",
        "exaone4_windows",
        "gemma",
        "internlm2",
        "pangu-embedded",
        "minicpm",
        "minicpm_long",
        "seed_oss",
    ),
    *("smollm3", "phi3", "phi3_short", "phi3_long", "granite", "olmo2", "olmo2_windows"),
    *("gemma2", "gemma2_wide", "gemma3", "gemma3_wide", "gemma3_full"),
    *("plamo3", "plamo3_pattern", "plamo3_full"),
    *("llama_joined", "qwen2_joined"),
)
# Cases that rotate a part of a head, of as many dimensions as GroupQueryAttention can.
OTHERS: Mapping[str, Mapping[str, object]] = {
    "glm4": {"head_dim": 32, "rotary_dim": 16},
    "phi3_partial": {"head_dim": 32, "rotary_dim": 16},
}


@pytest.mark.parametrize("case", [*EXPORTED, *OTHERS])
def test_logits_are_those_of_the_file(
    onnx_model: OnnxModelFactory, tiny_model: TinyModelFactory, case: str
) -> None:
    """Of prompts longer than all windows, and than the context before YaRN and LongRoPE."""
    options = {**options_of(case), **OTHERS.get(case, {})}
    tokens = make_tokens(CONTEXT)
    with open_llm(tiny_model(**options)) as llm:
        # LongRoPE: an export has the frequencies of a session of the whole context.
        runner = llm.start_runner(llm.config.context_length, all_rows=True)
        rows = []
        for first in range(0, CONTEXT, BATCH_SIZE):
            runner.prefill(tokens[first:][:BATCH_SIZE], is_last=first + BATCH_SIZE >= CONTEXT)
            rows.append(runner.row_logits(0, BATCH_SIZE))
    expected = np.concatenate(rows)
    found = Uncut(onnx_model(**options) / MODEL_NAME).read(tokens)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * expected.std())


@pytest.mark.parametrize("case", sorted(CASES.keys() - set(EXPORTED)))
def test_others_are_refused(tiny_model: TinyModelFactory, tmp_path: Path, case: str) -> None:
    """A case that can be exported belongs to those that are compared."""
    with pytest.raises(FormatError, match=r"written as ONNX|wants a multiple of 16"):
        export_model(tiny_model(**options_of(case)), tmp_path / "folder")

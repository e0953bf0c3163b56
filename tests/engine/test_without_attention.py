"""Models none of whose layers attends: there is nothing to read sparsely, and nothing to learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, ContextLengthError, HeadwiseConfig, SamplingParams
from edgeh2o.attention.head_budgets import NO_ATTENTION
from tools.make_tiny_model import write_tiny_model

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(params=["mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    return write_tiny_model(path, architecture=request.param, n_layers=2, context_length=4096)


@pytest.mark.parametrize(
    "attention",
    [
        HeadwiseConfig(),
        HeadwiseConfig(budget=64),
        HeadwiseConfig(max_loss=1.0),
    ],
    ids=["default", "budget", "max_loss"],
)
def test_statistics_say_that_nothing_attends(path: Path, attention: HeadwiseConfig) -> None:
    with LLM(path, attention=attention) as llm:
        prompt = np.full(3000, 5, np.int32)
        stats = llm.generate(prompt, ONE_TOKEN).stats
        assert stats.attention["table"] == NO_ATTENTION
        assert stats.note == ""
        assert stats.pairs_dense == 0


def test_no_rotation_is_offered_for_longer_prompts(path: Path) -> None:
    with LLM(path) as llm, pytest.raises(ContextLengthError) as error:
        llm.generate(np.full(5000, 5, np.int32), ONE_TOKEN)
    assert "use -c" in str(error.value)
    assert "rope" not in str(error.value)
    with pytest.warns(UserWarning, match="longer than the 4096 positions") as warned:
        LLM(path, context_size=6000).close()
    assert not any("rope" in str(each.message) for each in warned)

"""Models with a bias by distance (ALiBi) as LLM runs them: rules, full contexts, lookup, drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, H2OConfig, HeadwiseConfig, PrefillConfig, SamplingParams
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.errors import UsageError
from tests.model.model_pair import random_tokens
from tests.tiny_models import TinyModelFactory

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
STORY = "the art of war is that the hen and the pen were here on the other hand " * 8


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(architecture="refact", n_layers=2, n_kv_heads=1, context_length=4096)


@pytest.mark.parametrize(
    "attention", [H2OConfig(), H2OConfig(local=12, heavy=12), HeadwiseConfig(budget=512)]
)
def test_rules_are_refused(model: Path, attention: SparseAttentionConfig) -> None:
    with pytest.raises(UsageError, match=r"\(refact\) has a bias by distance \(ALiBi\) and reads"):
        LLM(model, attention=attention)
    for given in (None, DenseConfig(), HeadwiseConfig()):
        with LLM(model, attention=given) as llm:
            assert llm.attention.algorithm == "dense"
            with pytest.raises(UsageError, match=r"leave --attention and its flags out"):
                llm.start_runner(512, attention=attention)


def test_guesses_change_no_answer(model: Path) -> None:
    texts = []
    for lookup, draft in (("off", None), ("4", None), ("off", model)):
        sampling = replace(GREEDY, max_tokens=60, lookup=lookup, draft_tokens="4")
        with LLM(model, prefill=PrefillConfig(batch_size=128, chunk_size=32), draft=draft) as llm:
            result = llm.generate(STORY, sampling)
            texts.append(result.text)
            assert (result.stats.drafted_tokens > 0) == (lookup != "off" or draft is not None)
    assert len(set(texts)) == 1


def test_what_an_eviction_leaves_is_read_as_its_tokens_alone(tiny_model: TinyModelFactory) -> None:
    """Distances are counted in what is left: of one layer and KV head nothing else remains."""
    path = tiny_model(architecture="refact", n_layers=1, n_kv_heads=1)
    tokens, n_dropped = random_tokens(300), 30
    with LLM(path, cache_type="f32", attention_precision="f32") as llm:
        runner: Any = llm.start_runner(320)
        runner.allow_eviction(True)
        runner.prefill(tokens, is_last=True)
        before, _ = (rows.view(np.float32).reshape(300, -1).copy() for rows in runner.cached_rows())
        runner.evict(n_dropped)
        after = runner.cached_rows()[0].view(np.float32).reshape(300 - n_dropped, -1)
        kept: list[int] = []
        for row in after:
            first = kept[-1] + 1 if kept else 0
            kept.append(first + int(np.flatnonzero((before[first:] == row).all(axis=1))[0]))
        assert kept[0] == 0 and kept != list(range(len(kept)))
        fresh: Any = llm.start_runner(320)
        fresh.prefill(tokens[kept], is_last=True)
        for token in (7, 8):
            np.testing.assert_allclose(runner.decode(token), fresh.decode(token), atol=1e-5)

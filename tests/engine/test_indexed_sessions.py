"""Models with an indexer of their own as LLM runs them: chats, session files, lookup, drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.config import PrefillConfig
from edgeh2o.errors import UsageError
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.tiny_models import TinyModelFactory

SHAPE = {"n_layers": 3, "model_dim": 64, "n_heads": 4, "ffn_dim": 32, "n_experts": 0}
PREFILL = PrefillConfig(batch_size=128, chunk_size=32)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
STORY = "the art of war is that the hen and the pen were here on the other hand " * 8


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(architecture="glm-dsa", indexer_period=2, context_length=2048, **SHAPE)


def test_a_chat_goes_on_from_its_session_file(model: Path, tmp_path: Path) -> None:
    first = [{"role": "user", "content": STORY}]
    with LLM(model, prefill=PREFILL) as llm:
        assert llm.attention.algorithm == "dense"
        answer = llm.chat(first, GREEDY).text
        llm.save_session(tmp_path / "chat.session")
        second = [
            *first,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "and"},
        ]
        expected = llm.chat(second, GREEDY)
        assert expected.stats.cached_tokens > 200
        # Another question on the same text goes back to where they part.
        changed = [*first, {"role": "user", "content": "or"}]
        went_back = llm.chat(changed, GREEDY)
        assert went_back.stats.cached_tokens > 200
    with LLM(model, prefill=PREFILL) as other:
        other.load_session(tmp_path / "chat.session")
        result = other.chat(second, GREEDY)
        assert (result.text, result.stats.cached_tokens) == (
            expected.text,
            expected.stats.cached_tokens,
        )
    with LLM(model, prefill=PREFILL) as fresh:
        assert fresh.chat(changed, GREEDY).text == went_back.text


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_guesses_change_no_answer(model: Path, temperature: float) -> None:
    texts = []
    for lookup, draft in (("off", None), ("4", None), ("off", model)):
        sampling = replace(
            GREEDY, temperature=temperature, max_tokens=60, lookup=lookup, draft_tokens="4"
        )
        with LLM(model, prefill=PREFILL, draft=draft, seed=3) as llm:
            result = llm.generate(STORY, sampling)
            texts.append(result.text)
            assert (result.stats.drafted_tokens > 0) == (lookup != "off" or draft is not None)
    assert len(set(texts)) == 1


@pytest.mark.parametrize("attention", [H2OConfig(), HeadwiseConfig(budget=512)])
def test_rules_beside_the_indexer_are_refused(
    model: Path, attention: H2OConfig | HeadwiseConfig
) -> None:
    with pytest.raises(UsageError, match=r"\(glm-dsa\) read what its own indexer chooses"):
        LLM(model, attention=attention)
    with (
        LLM(model, prefill=PREFILL) as llm,
        pytest.raises(UsageError, match=r"leave --attention and its flags out"),
    ):
        llm.start_runner(512, attention=attention)

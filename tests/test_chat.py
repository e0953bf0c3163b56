"""LLM.chat and prompts that go on from the cache: what is read anew, and that answers agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.config import PrefillConfig
from edgeh2o.engine import context_size
from edgeh2o.errors import FormatError, UsageError
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.tiny_models import TinyModelFactory

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL_CHUNKS = PrefillConfig(batch_size=32, chunk_size=8)
TEXT = "the art of the thing is that it is there and for all that"


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(tensor_type="Q4_0")


@pytest.fixture(params=["h2o", "dense"])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    attention = H2OConfig(local=2, heavy=3) if request.param == "h2o" else DenseConfig()
    with LLM(model, seed=5, prefill=SMALL_CHUNKS, attention=attention) as llm:
        yield llm


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_conversation_reads_only_what_is_new(llm: LLM) -> None:
    messages = [_user(TEXT)]
    first = llm.chat(messages, GREEDY)
    assert first.stats.cached_tokens == 0
    messages += [{"role": "assistant", "content": first.text}, _user("and then?")]
    second = llm.chat(messages, GREEDY)
    # All but the last token of the answer, which was never fed back.
    assert second.stats.cached_tokens == first.stats.prompt_tokens + 5
    prompt_ids = llm.chat_template.encode(messages)
    assert second.stats.prompt_tokens <= len(prompt_ids) + 6
    assert second.stats.pairs_dense > 0


def test_a_stream_of_a_chat_is_the_same_answer(llm: LLM) -> None:
    whole = llm.chat([_user(TEXT)], GREEDY)
    chunks = list(llm.stream_chat([_user(TEXT)], GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_a_chat_s_first_answer_is_that_of_its_rendered_text(llm: LLM) -> None:
    messages = [_user(TEXT)]
    rendered = llm.chat_template.render(messages).plain_text
    assert llm.chat(messages, GREEDY).token_ids == llm.generate(rendered, GREEDY).token_ids


def test_the_same_prompt_again_reads_nothing(llm: LLM) -> None:
    first = llm.generate(TEXT, GREEDY, keep_cache=True)
    again = llm.generate(TEXT, GREEDY, keep_cache=True)
    assert again.token_ids == first.token_ids
    assert again.stats.cached_tokens == again.stats.prompt_tokens
    assert again.stats.prefill_tps is None


def test_another_prompt_begins_anew(llm: LLM) -> None:
    alone = llm.generate("in all", GREEDY).token_ids
    llm.generate(TEXT, GREEDY, keep_cache=True)
    other = llm.generate("in all", GREEDY, keep_cache=True)
    assert other.stats.cached_tokens == 0
    assert other.token_ids == alone


def test_a_prompt_without_keep_cache_is_not_gone_on_from(llm: LLM) -> None:
    llm.generate(TEXT, GREEDY)
    longer = llm.generate(TEXT + " and more", GREEDY, keep_cache=True)
    assert longer.stats.cached_tokens == 0


def test_an_answer_that_the_template_changes_is_read_again(llm: LLM) -> None:
    """Its cached tokens are dropped one by one; the prompt before it stays."""
    first = llm.chat([_user(TEXT)], GREEDY)
    messages = [_user(TEXT), {"role": "assistant", "content": "no"}, _user("and?")]
    assert llm.chat(messages, GREEDY).stats.cached_tokens == first.stats.prompt_tokens


def test_going_on_equals_reading_at_once_when_attention_is_dense(model: Path) -> None:
    with LLM(model, prefill=SMALL_CHUNKS, attention=DenseConfig(), cache_type="f32") as llm:
        whole = llm.generate(TEXT + " and more", GREEDY)
        llm.generate(TEXT, GREEDY, keep_cache=True)
        longer = llm.generate(TEXT + " and more", GREEDY, keep_cache=True)
    assert longer.stats.cached_tokens > 0
    assert longer.token_ids == whole.token_ids


def test_a_long_conversation_moves_to_a_longer_context(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_size, "MIN_DEFAULT_CONTEXT", 64)
    monkeypatch.setattr(context_size, "CONTEXT_STEP", 16)
    start = [1 + i % 300 for i in range(60)]
    results = []
    for asked_for in (None, 200):
        with LLM(
            model,
            context_size=asked_for,
            prefill=SMALL_CHUNKS,
            attention=H2OConfig(local=2, heavy=3),
        ) as llm:
            llm.generate(start, replace(GREEDY, max_tokens=4), keep_cache=True)
            results.append(llm.generate(start + [5] * 20, GREEDY, keep_cache=True))
    grown, roomy = results
    assert grown.stats.cached_tokens == roomy.stats.cached_tokens == 60
    assert grown.stats.context_size == 128
    assert grown.token_ids == roomy.token_ids


def test_an_interrupt_leaves_a_conversation_that_goes_on(model: Path) -> None:
    is_armed = False

    def interrupt(stage: str, done: int, total: int) -> None:
        if is_armed and stage == "prefill" and done:
            raise KeyboardInterrupt

    with LLM(model, on_progress=interrupt) as llm:
        expected = llm.chat([_user(TEXT)], GREEDY).token_ids
        llm.generate("in", GREEDY)
        is_armed = True
        with pytest.raises(KeyboardInterrupt):
            llm.chat([_user(TEXT)], GREEDY)
        is_armed = False
        assert llm.chat([_user(TEXT)], GREEDY).token_ids == expected
        stream = llm.stream_chat([_user(TEXT)], GREEDY)
        for _ in range(3):
            next(stream)
        said = stream.result().text
        messages = [_user(TEXT), {"role": "assistant", "content": said}, _user("go on")]
        assert llm.chat(messages, GREEDY).stats.cached_tokens > 0


def test_templates_that_do_not_serve(model: Path) -> None:
    with (
        LLM(model, chat_template="{{ raise_exception('no') }}") as llm,
        pytest.raises(FormatError, match="refuses these messages: no"),
    ):
        llm.chat([_user("a")])
    with pytest.raises(FormatError, match="chat template fails"):
        LLM(__file__, chat_template="{% if %}")  # before the model is looked at


def test_a_broken_template_in_the_file_harms_the_chat_only(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model) as llm:
        monkeypatch.setattr(llm.model, "chat_template", "{% if %}")
        assert llm.generate("in", GREEDY).text
        with pytest.raises(FormatError, match="chat template fails"):
            llm.chat([_user("a")])


def test_a_model_without_a_template(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model) as llm:
        monkeypatch.setattr(llm.model, "chat_template", None)
        with pytest.raises(UsageError, match="no chat template; give one with --chat-template"):
            llm.chat([_user("a")])

"""openai-python reads streams of several answers, which are those that are told whole."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from tests.serving.chats import MESSAGES
from tests.serving.conftest import RunningServer
from tests.serving.fetching import fetch


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_of_several_answers_is_the_whole_ones(client: openai.OpenAI, usage: bool) -> None:
    """Every chunk names its choice, all have one id, and the usage comes once."""
    options: Any = {"model": "any", "max_tokens": 9, "seed": 3, "temperature": 1.5, "n": 3}
    streamed: Any = options | {"stream": True, "stream_options": {"include_usage": usage}}
    whole = client.chat.completions.create(**options, messages=MESSAGES, logprobs=True)
    chunks = list(client.chat.completions.create(**streamed, messages=MESSAGES, logprobs=True))
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(len(chunk.choices) == 1 for chunk in chunks if chunk.usage is None)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for expected in whole.choices:
        own = [choice for choice in choices if choice.index == expected.index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == expected.message.content
        reasons = [choice.finish_reason for choice in own if choice.finish_reason]
        assert reasons == [expected.finish_reason] and own[-1].finish_reason
        assert expected.logprobs is not None and expected.logprobs.content is not None
        told = [t.token for c in own if c.logprobs for t in c.logprobs.content or ()]
        assert told == [token.token for token in expected.logprobs.content]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == usage and (not usage or chunks[-1].choices == [])
    if usage:
        assert whole.usage is not None
        counted = usages[0].prompt_tokens, usages[0].completion_tokens
        assert counted == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_a_stream_of_several_prompts_is_the_whole_ones(client: openai.OpenAI) -> None:
    options: Any = {"model": "any", "max_tokens": 5, "seed": 3, "temperature": 1.5, "n": 2}
    options |= {"prompt": ["the hen", "a pen and"], "logprobs": 1}
    whole = client.completions.create(**options)
    usage: Any = {"include_usage": True}
    chunks = list(client.completions.create(**options, stream=True, stream_options=usage))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for expected in whole.choices:
        own = [choice for choice in choices if choice.index == expected.index]
        assert "".join(choice.text for choice in own) == expected.text
        assert [c.finish_reason for c in own if c.finish_reason] == [expected.finish_reason]
        assert expected.logprobs is not None
        offsets = [o for c in own if c.logprobs for o in c.logprobs.text_offset or ()]
        assert offsets == expected.logprobs.text_offset
    assert [chunk.usage for chunk in chunks if chunk.usage] == [chunks[-1].usage]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_an_error_ends_a_stream_of_several_answers(server: RunningServer) -> None:
    """Before anything is told it has a status, later it is an event."""
    body: dict[str, Any] = {"messages": MESSAGES, "n": 2, "stream": True}
    data = json.dumps(body | {"logit_bias": {"999999": 1}}).encode()
    reply = fetch(server, "/v1/chat/completions", data, {"content-type": "application/json"})
    assert reply.status_code == 400 and "beyond the vocabulary" in reply.text
    body = {"prompt": ["a hen", "a " * 9000], "stream": True, "max_tokens": 3000}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    reply = fetch(server, "/v1/completions", data, {"content-type": "application/json"})
    told = [line for line in reply.text.split("\n") if line.startswith("data: ")]
    errors = [line for line in told if '"context_length_exceeded"' in line]
    assert errors == ([told[-2]] if reply.status_code == 200 else []) or reply.status_code == 400


def test_a_stream_of_several_answers_can_be_left(
    client: openai.OpenAI, server: RunningServer
) -> None:
    stream = client.chat.completions.create(
        model="any", messages=MESSAGES, n=2, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    for _ in range(200):
        if not any(slot["is_processing"] for slot in fetch(server, "/slots").json()):
            return
        time.sleep(0.05)
    raise AssertionError("it goes on without anybody")

"""openai-python against a real server: sync, async, sampling, structured output."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.chats import MESSAGES
from tests.serving.conftest import RunningServer, StartServer
from tests.serving.fetching import fetch

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}


def test_models_have_a_name(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_chat_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    options: Any = {"model": "any", "messages": MESSAGES, "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**options)
    assert whole.object == "chat.completion"
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    roles = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices]
    assert roles[0] == "assistant" and not any(roles[1:])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-2].choices[0].delta.content is None
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens  # the same prompt again
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_sampling_follows_the_request(client: openai.OpenAI) -> None:
    def text(**options: Any) -> str:
        made = client.chat.completions.create(
            model="m", messages=MESSAGES, max_completion_tokens=10, **options
        )
        return str(made.choices[0].message.content)

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=seed, temperature=2) for seed in range(4)}) > 1
    assert text(temperature=0, seed=1) == text(top_p=0, seed=2)
    assert text(logit_bias={"40": 100}, temperature=0) == "%" * 10


def test_stop_texts_end_an_answer(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=20, stop=["%%"], logit_bias={"40": 100}
    )
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("", "stop")


def test_logprobs_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3, temperature=0
    )
    content = made.choices[0].logprobs and made.choices[0].logprobs.content
    assert content and len(content) == 5
    for token in content:
        assert token.logprob == token.top_logprobs[0].logprob < 0
        ordered = [other.logprob for other in token.top_logprobs]
        assert ordered == sorted(ordered, reverse=True) and len(ordered) == 3
    raw = b"".join(bytes(token.bytes or []) for token in content)
    assert raw.decode("utf-8", errors="replace") == made.choices[0].message.content


def test_logprobs_leave_out_what_a_stop_text_takes_away(client: openai.OpenAI) -> None:
    options: Any = {"messages": MESSAGES, "max_tokens": 12, "logprobs": True, "temperature": 0}
    whole = client.chat.completions.create(model="m", **options).choices[0]
    assert whole.message.content and whole.logprobs and whole.logprobs.content
    tokens = [token.token for token in whole.logprobs.content]
    stop = "".join(tokens[4:8])  # held back in part until the last of them is there
    text = whole.message.content.partition(stop)[0]
    n_kept = next(n for n in range(13) if "".join(tokens[:n]) == text)
    options |= {"stop": [stop]}
    cut = client.chat.completions.create(model="m", **options).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text, "stop")
    assert cut.logprobs == whole.logprobs.model_copy(
        update={"content": whole.logprobs.content[:n_kept]}
    )
    said, streamed = "", []
    for chunk in client.chat.completions.create(model="m", stream=True, **options):
        for choice in chunk.choices:
            said += choice.delta.content or ""
            if choice.logprobs:
                streamed += choice.logprobs.content or []
    assert (said, [token.token for token in streamed]) == (text, tokens[:n_kept])
    options["stop"] = ["".join(tokens[9:]) + "x"]  # begins, and is none
    nearly = client.chat.completions.create(model="m", **options).choices[0]
    assert nearly.logprobs == whole.logprobs


def test_structured_output_has_its_form(client: openai.OpenAI) -> None:
    for seed in range(3):
        made = client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            seed=seed,
            max_tokens=200,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            },
        )
        if made.choices[0].finish_reason == "stop":
            value = json.loads(str(made.choices[0].message.content))
            assert set(value) == {"name", "n"} and isinstance(value["n"], int)
    regex: Any = {"type": "regex", "regex": "(yes|no)"}
    made = client.chat.completions.create(model="m", messages=MESSAGES, response_format=regex)
    assert made.choices[0].message.content in ("yes", "no")
    for bare in ({"grammar": 'root ::= "yes" | "no"'}, {"json_schema": {"enum": ["yes", "no"]}}):
        made = client.chat.completions.create(model="m", messages=MESSAGES, extra_body=bare)
        assert str(made.choices[0].message.content).strip('"') in ("yes", "no")


def test_texts_are_completed(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="m", prompt="the hen ", max_tokens=6, seed=2, logprobs=2, temperature=0
    )
    logprobs = made.choices[0].logprobs
    assert logprobs and logprobs.tokens and len(logprobs.tokens) == 6
    chunks = client.completions.create(
        model="m", prompt="the hen ", max_tokens=6, seed=2, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == made.choices[0].text
    ids: Any = [10, 20, 30]
    assert client.completions.create(model="m", prompt=ids, max_tokens=1).usage.prompt_tokens == 3  # type: ignore[union-attr]


def test_asynchronous_clients_run_side_by_side(server: RunningServer) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="x", max_retries=0
        ) as client:

            async def one(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"number {number} of the pens"}]
                stream = await client.chat.completions.create(
                    model="m", messages=messages, max_tokens=10, seed=number, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            together = await asyncio.gather(*(one(number) for number in range(10)))
            alone = [await one(number) for number in range(10)]
            assert together == alone
            return together

    assert len(set(asyncio.run(run()))) > 1


def test_a_prompt_that_is_too_long_says_so_by_its_code(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "the hen is in the pen " * 2000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=messages)
    assert caught.value.code == "context_length_exceeded"
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", messages=messages, stream=stream)
    # So long that they are not tokenised.
    messages[0]["content"] *= 100
    for call in (
        lambda: client.chat.completions.create(model="m", messages=messages),
        lambda: client.completions.create(model="m", prompt=[5] * 140_000),
    ):
        with pytest.raises(openai.BadRequestError, match="at least") as caught:
            call()
        assert caught.value.code == "context_length_exceeded"


def test_a_key_may_have_any_letters(start_server: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("schlüssel\n", "utf-8")
    server = start_server("--api-key-file", str(file))
    for key, status in (("schlüssel", 200), ("schlussel", 401)):
        bearer = {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
        assert fetch(server, "/v1/models", headers=bearer).status_code == status
    assert server.stop() == 0


def test_a_key_is_asked_for(start_server: StartServer) -> None:
    server = start_server("--api-key", "secret", "--alias", "mine")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    assert client.models.list().data[0].id == "mine"
    assert server.stop() == 0
    assert "Traceback" not in server.log

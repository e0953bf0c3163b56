"""openai-python against a real server: sync, async, streams, tools, structured output."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.conftest import RunningServer, StartServer
from tests.serving.fetching import fetch

MESSAGES: Any = [{"role": "user", "content": "the hen is in the pen and the art is there"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [4, 5]}},
                "required": ["a", "b"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


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


def test_some_of_the_tools_may_be_called(client: openai.OpenAI, server: RunningServer) -> None:
    """All of them stand in the prompt, which is then read once for every choice."""
    tools: Any = [
        {"type": "function", "function": TOOLS[0]["function"] | {"name": name}}
        for name in ("add", "take", "give")
    ]
    counts = set()
    for mode, names in (("required", ["take"]), ("required", ["give", "take"]), ("auto", ["add"])):
        allowed = {
            "mode": mode,
            "tools": [{"type": "function", "function": {"name": name}} for name in names],
        }
        options: Any = {"model": "any", "messages": MESSAGES, "max_tokens": 60, "tools": tools}
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        whole = client.chat.completions.create(**options, tool_choice=choice, seed=1)
        assert whole.usage is not None
        counts.add(whole.usage.prompt_tokens)
        calls = whole.choices[0].message.tool_calls or []
        assert {call.function.name for call in calls} <= set(names)  # type: ignore[union-attr]
        assert calls or mode == "auto"
        flat: Any = [tool["function"] | {"type": "function"} for tool in tools]
        named: Any = [{"type": "function", "name": name} for name in names]
        choice = {"type": "allowed_tools", "mode": mode, "tools": named}
        answer = client.responses.create(
            model="any", input="the hen", tools=flat, tool_choice=choice
        )
        assert {item.name for item in answer.output if item.type == "function_call"} <= set(names)
        assert answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]
    assert len(counts) == 1
    for wrong in (
        {"mode": "required", "tools": []},
        {"mode": "required", "tools": [{"type": "function", "function": {"name": "none"}}]},
        {"mode": "required", "tools": [{"type": "function"}]},
        {"mode": "any", "tools": [{"type": "function", "function": {"name": "add"}}]},
        {},
    ):
        body = {"messages": MESSAGES, "tools": tools}
        body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": wrong}
        data = json.dumps(body).encode()
        reply = fetch(server, "/v1/chat/completions", data, {"content-type": "application/json"})
        assert reply.status_code == 400 and "tool_choice" in reply.json()["error"]["param"]


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


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_required_call_is_one(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    made = client.chat.completions.create(**options, seed=1, max_tokens=400)
    (call,) = made.choices[0].message.tool_calls or []
    assert (made.choices[0].finish_reason, made.choices[0].message.content) == ("tool_calls", None)
    assert call.type == "function" and call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert arguments["a"] in (1, 2, 3) and arguments["b"] in (4, 5)
    parts = [
        chunk.choices[0].delta.tool_calls[0]
        for chunk in client.chat.completions.create(**options, seed=1, max_tokens=400, stream=True)
        if chunk.choices[0].delta.tool_calls
    ]
    assert parts[0].id and parts[0].function and parts[0].function.name == "add"
    streamed = "".join(part.function.arguments or "" for part in parts if part.function)
    assert json.loads(streamed) == arguments
    # The conversation goes on with the call and its result.
    messages = [
        *MESSAGES,
        made.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "6"},
    ]
    after = client.chat.completions.create(
        model="m",
        messages=messages,
        tools=TOOLS,
        max_tokens=4,  # type: ignore[arg-type]
    )
    assert after.usage and after.usage.prompt_tokens > made.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_required_call_leaves_a_form_nothing_to_shape(client: openai.OpenAI) -> None:
    """It was refused; clients send both."""
    made = client.chat.completions.create(
        model="m",
        messages=MESSAGES,  # type: ignore[arg-type]
        tools=TOOLS,  # type: ignore[arg-type]
        tool_choice="required",
        response_format={"type": "json_object"},
        seed=1,
        max_tokens=400,
    )
    assert made.choices[0].finish_reason == "tool_calls"
    assert made.choices[0].message.tool_calls and made.choices[0].message.content is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_required_call_that_is_cut_is_a_call_by_length(
    client: openai.OpenAI, choice: Any
) -> None:
    """With the beginning of its arguments, as that of OpenAI; it came back as the text."""
    options: Any = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    whole = client.chat.completions.create(**options, seed=1, max_tokens=400)
    (complete,) = whole.choices[0].message.tool_calls or []
    assert complete.type == "function" and whole.usage
    for n in range(1, whole.usage.completion_tokens - 1, 7):
        made = client.chat.completions.create(**options, seed=1, max_tokens=n)
        assert (made.choices[0].finish_reason, made.choices[0].message.content) == ("length", None)
        (call,) = made.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "add"
        begun = "".join(call.function.arguments.split())
        assert "".join(complete.function.arguments.split()).startswith(begun)
        parts = [
            part.function.arguments or ""
            for chunk in client.chat.completions.create(
                **options, seed=1, max_tokens=n, stream=True
            )
            for part in chunk.choices[0].delta.tool_calls or []
            if part.function
        ]
        assert "".join(parts) == call.function.arguments
    # A conversation that has it goes on.
    messages = [
        *MESSAGES,
        made.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "it was cut"},
    ]
    after = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, max_tokens=2)
    assert after.usage and after.usage.completion_tokens == 2


def test_a_required_call_that_a_stop_text_ends_is_no_text(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    made = client.chat.completions.create(**options, seed=1, max_tokens=400, stop=['"b"'])
    (call,) = made.choices[0].message.tool_calls or []
    assert (made.choices[0].finish_reason, made.choices[0].message.content) == ("stop", None)
    assert call.type == "function" and call.function.arguments.startswith("{")


def test_what_cannot_be_enforced_is_ignored_unless_strict(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"enum": [1]}},
            "secret": {"type": "string", "format": "password", "maxLength": 2},
        },
        "required": ["tags"],
    }
    for is_strict in (False, True):
        function = {"name": "f", "parameters": parameters, "strict": is_strict}
        named = {"name": "f", "schema": parameters, "strict": is_strict}
        call: Any = {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        }
        form: Any = {"response_format": {"type": "json_schema", "json_schema": named}}
        for options in (call, form):
            if is_strict:
                with pytest.raises(openai.BadRequestError, match="uniqueItems"):
                    client.chat.completions.create(model="m", messages=MESSAGES, **options)
            else:
                client.chat.completions.create(
                    model="m", messages=MESSAGES, max_tokens=4, **options
                )
    bare = {"json_schema": parameters}
    client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=4, extra_body=bare)


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

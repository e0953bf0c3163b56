"""anthropic-python against a real server: whole answers, streams, tools, thoughts, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import RunningServer, StartServer
from tests.serving.fetching import fetch
from tests.serving.templates import THINKING

anthropic = pytest.importorskip("anthropic")

MESSAGES: Any = [{"role": "user", "content": "the hen is in the pen and the art is there"}]
PATH = "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [4, 5]}},
    "required": ["a", "b"],
}
TOOLS: Any = [{"name": "add", "description": "adds two numbers", "input_schema": SCHEMA}]


def client_of(server: RunningServer, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def blocks_of(message: Any) -> list[dict[str, Any]]:
    """Without what the client's helpers add, and with no ids, which are new ones each time."""
    return [
        block.model_dump(exclude_none=True, exclude={"id", "parsed_output"})
        for block in message.content
    ]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


def seeded(**fields: Any) -> dict[str, Any]:
    """Fields of a request whose answer is the same each time."""
    extra = {"seed": 3, **fields.pop("extra_body", {})}
    return {"model": "m", "messages": MESSAGES, "max_tokens": 12, "extra_body": extra} | fields


def test_a_message_and_its_stream_are_the_same(client: Any) -> None:
    whole = client.messages.create(**seeded())
    assert (whole.type, whole.role, whole.stop_sequence) == ("message", "assistant", None)
    assert whole.id.startswith("msg_") and whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 12 and whole.usage.cache_creation_input_tokens == 0
    with client.messages.stream(**seeded()) as stream:
        events = list(stream)
        made = stream.get_final_message()
        text = "".join(event.text for event in events if event.type == "text")
    assert blocks_of(made) == blocks_of(whole) and text == whole.content[0].text
    assert (made.stop_reason, made.stop_sequence) == (whole.stop_reason, None)
    kinds = [event.type for event in events if event.type not in ("text", "content_block_delta")]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[2:] == ["content_block_stop", "message_delta", "message_stop"]
    # The same prompt again: all of it was read before, and is not counted as read.
    n_prompt = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    started = events[0].message.usage
    for usage in (started, made.usage):
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (0, n_prompt)
    assert (started.output_tokens, made.usage.output_tokens) == (0, 12)


def test_tokens_are_counted_as_they_are_read(client: Any) -> None:
    options: Any = {"model": "m", "messages": MESSAGES, "system": "be kind", "tools": TOOLS}
    counted = client.messages.count_tokens(**options).input_tokens
    usage = client.messages.create(**options, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_stop_sequences_end_a_message(client: Any) -> None:
    always = {"logit_bias": {"40": 100}}
    made = client.messages.create(**seeded(stop_sequences=["x", "%%"], extra_body=always))
    assert (made.stop_reason, made.stop_sequence, made.content) == ("stop_sequence", "%%", [])
    with client.messages.stream(**seeded(stop_sequences=["%%"], extra_body=always)) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "%%")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_call_its_result_and_the_answer(client: Any, choice: Any) -> None:
    options = seeded(tools=TOOLS, tool_choice=choice, max_tokens=400)
    made = client.messages.create(**options)
    (call,) = made.content
    assert (made.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "add")
    assert call.id.startswith("toolu_")
    assert call.input["a"] in (1, 2, 3) and call.input["b"] in (4, 5)
    with client.messages.stream(**options) as stream:
        assert blocks_of(stream.get_final_message()) == blocks_of(made)
    result = {"type": "tool_result", "tool_use_id": call.id}
    told = [{"type": "text", "text": "it is 6"}]
    after = []
    for content in ("it is 6", told):
        turn = {"role": "user", "content": [{**result, "content": content}]}
        messages = [*MESSAGES, {"role": "assistant", "content": made.content}, turn]
        after.append(client.messages.create(**seeded(messages=messages, tools=TOOLS)))
    assert blocks_of(after[0]) == blocks_of(after[1])
    usage = after[0].usage
    assert usage.input_tokens + usage.cache_read_input_tokens > made.usage.output_tokens


def test_a_call_that_is_cut_is_no_whole_one(client: Any) -> None:
    options = seeded(tools=TOOLS, tool_choice={"type": "any"}, max_tokens=400)
    whole = client.messages.create(**options)
    for n in range(1, whole.usage.output_tokens - 1, 9):
        options["max_tokens"] = n
        made = client.messages.create(**options)
        (call,) = made.content
        assert (made.stop_reason, call.name, call.input) == ("max_tokens", "add", {})
        with client.messages.stream(**options) as stream:
            assert stream.get_final_message().stop_reason == "max_tokens"


def test_structured_output_has_its_form(client: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    made = client.messages.create(**seeded(max_tokens=400, output_config=form))
    assert made.stop_reason == "end_turn"
    assert set(json.loads(made.content[0].text)) == {"a", "b"}


def test_thoughts_are_blocks_of_their_own(start_server: StartServer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(THINKING, "utf-8")
    server = start_server("--chat-template", str(template), "-b", "256", "-ub", "64")
    grammar = {"grammar": 'root ::= "well" "</think>" "\\n\\n" "yes"'}
    with client_of(server) as client:
        options = seeded(extra_body=grammar, max_tokens=50)
        made = client.messages.create(**options)
        assert [block.type for block in made.content] == ["thinking", "text"]
        assert (made.content[0].thinking, made.content[1].text) == ("well", "yes")
        with client.messages.stream(**options) as stream:
            assert blocks_of(stream.get_final_message()) == blocks_of(made)
        # It goes on with what was thought, which is read again at most from there on.
        messages = [*MESSAGES, {"role": "assistant", "content": made.content}, *MESSAGES]
        after = client.messages.create(**seeded(messages=messages))
        assert after.usage.cache_read_input_tokens > 0
        counts = {
            kind: client.messages.count_tokens(
                model="m", messages=MESSAGES, thinking={"type": kind} | more
            ).input_tokens
            for kind, more in (("enabled", {"budget_tokens": 1024}), ("disabled", {}))
        }
        default = client.messages.count_tokens(model="m", messages=MESSAGES).input_tokens
        assert counts["enabled"] == default > counts["disabled"]
        plain = seeded(thinking={"type": "disabled"}, extra_body={"grammar": 'root ::= "yes"'})
        assert [block.text for block in client.messages.create(**plain).content] == ["yes"]
    assert server.stop() == 0
    assert "Traceback" not in server.log


def test_the_key_is_taken_by_either_header(start_server: StartServer) -> None:
    server = start_server("--api-key", "secret")
    with client_of(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as told:
        client.messages.create(**seeded())
    assert told.value.body["error"]["type"] == "authentication_error"
    with client_of(server, "secret") as client:
        assert client.messages.create(**seeded()).usage.output_tokens == 12
    with anthropic.Anthropic(
        base_url=server.url, auth_token="secret", api_key=None, max_retries=0
    ) as client:
        assert client.messages.count_tokens(model="m", messages=MESSAGES).input_tokens
    assert server.stop() == 0


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_agents_know(client: Any) -> None:
    messages = [{"role": "user", "content": "the hen is in the pen " * 2000}]
    for _ in range(2):
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192"
        ):
            client.messages.create(**seeded(messages=messages))
        messages[0]["content"] *= 50  # not tokenised any more


def test_errors_have_the_form_of_the_interface(server: RunningServer) -> None:
    json_body = {"content-type": "application/json"}
    for path, body, headers, status, kind in (
        (PATH, b"{}", json_body, 400, "invalid_request_error"),
        (PATH, b"{", json_body, 400, "invalid_request_error"),
        (PATH, b"{}", {"content-type": "text/plain"}, 415, "invalid_request_error"),
        (PATH, b" " * (33 * 2**20), json_body, 413, "request_too_large"),
        (PATH, b"{}", json_body | {"host": "evil.example"}, 400, "invalid_request_error"),
        (f"{PATH}/batches", b"{}", json_body, 404, "not_found_error"),
        (PATH, None, {}, 405, "invalid_request_error"),
    ):
        reply = fetch(server, path, body, headers)
        assert reply.status_code == status, reply.text
        told = reply.json()
        assert (told["type"], told["error"]["type"]) == ("error", kind)
        assert set(told["error"]) == {"type", "message"}

"""openai-python's Responses API against a real server: whole answers, streams, tools, thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.serving.conftest import RunningServer, StartServer
from tests.serving.fetching import ask
from tests.serving.templates import THINKING

INPUT = "the hen is in the pen and the art is there"
PATH = "/v1/responses"
TOOLS: Any = [
    {
        "type": "function",
        "name": "add",
        "description": "adds two numbers",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [4, 5]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    }
]


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def seeded(**fields: Any) -> dict[str, Any]:
    """Fields of a request whose answer is the same each time."""
    extra = {"seed": 3, **fields.pop("extra_body", {})}
    return {"model": "m", "input": INPUT, "max_output_tokens": 12, "extra_body": extra} | fields


def items_of(response: Any) -> list[dict[str, Any]]:
    """Without ids, which are new ones each time, and what the client's helpers add."""
    left_out = {"id", "call_id", "parsed_arguments"}
    items = [item.model_dump(exclude_none=True, exclude=left_out) for item in response.output]
    for item in items:
        for part in item.get("content", []):
            part.pop("parsed", None)
    return items


def streamed(client: openai.OpenAI, **options: Any) -> tuple[Any, list[str]]:
    """The last response of a stream, and the kinds of its events."""
    with client.responses.stream(**options) as stream:
        events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response, [event.type.removeprefix("response.") for event in events]


def test_a_response_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(**seeded())
    assert whole.id.startswith("resp_") and whole.object == "response"
    assert whole.status == "incomplete" and whole.incomplete_details
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage and whole.usage.output_tokens == 12
    assert whole.usage.total_tokens == whole.usage.input_tokens + 12
    made, kinds = streamed(client, **seeded())
    assert items_of(made) == items_of(whole) and made.output_text == whole.output_text != ""
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == ends and set(kinds[4:-4]) == {"output_text.delta"}
    assert made.usage.input_tokens_details.cached_tokens == whole.usage.input_tokens
    assert made.usage.output_tokens_details.reasoning_tokens == 0


def test_an_answer_that_ends_is_complete(client: openai.OpenAI) -> None:
    options = seeded(extra_body={"grammar": 'root ::= "yes"'}, instructions="be kind")
    whole = client.responses.create(**options)
    assert (whole.status, whole.output_text, whole.error) == ("completed", "yes", None)
    made, kinds = streamed(client, **options)
    assert (made.output_text, kinds[-1]) == ("yes", "completed")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_call_its_result_and_the_answer(client: openai.OpenAI, choice: Any) -> None:
    options = seeded(tools=TOOLS, tool_choice=choice, max_output_tokens=400)
    whole = client.responses.create(**options)
    (call,) = whole.output
    assert (whole.status, call.type) == ("completed", "function_call")
    assert call.type == "function_call" and call.name == "add"
    made, kinds = streamed(client, **options)
    assert items_of(made) == items_of(whole)
    ends = ["function_call_arguments.done", "output_item.done", "completed"]
    assert kinds[2] == "output_item.added" and kinds[-3:] == ends
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"} and len(kinds) > 8
    arguments = made.output[0].parsed_arguments
    assert arguments["a"] in (1, 2, 3) and arguments["b"] in (4, 5)
    answers = []
    for output in ("it is 6", [{"type": "input_text", "text": "it is 6"}]):
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        told: Any = [{"role": "user", "content": INPUT}, call.to_dict(), result]
        answers.append(client.responses.create(**seeded(input=told, tools=TOOLS)))
    assert answers[0].output_text == answers[1].output_text != ""
    assert answers[0].usage and whole.usage
    assert answers[0].usage.input_tokens > whole.usage.input_tokens


def test_a_call_of_a_tool_in_a_namespace(client: openai.OpenAI) -> None:
    """As Codex has tools of MCP: the call names both, and so does the conversation."""
    namespace = {"type": "namespace", "name": "mcp__math", "description": "x", "tools": TOOLS}
    choice = {"type": "function", "name": "add", "namespace": "mcp__math"}
    options = seeded(tools=[namespace], tool_choice=choice, max_output_tokens=400)
    whole: Any = client.responses.create(**options).to_dict()
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "add", "mcp__math")
    assert whole["tool_choice"] == choice
    (described,) = whole["tools"]
    assert (described["type"], described["name"]) == ("namespace", "mcp__math")
    assert [tool["name"] for tool in described["tools"]] == ["add"]
    events: list[Any] = [
        event.to_dict() for event in client.responses.create(**options, stream=True)
    ]
    items = [event["item"] for event in events if "item" in event]
    assert [(item["name"], item["namespace"]) for item in items] == [("add", "mcp__math")] * 2
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "6"}
    told: Any = [{"role": "user", "content": INPUT}, call, result]
    answered: Any = client.responses.create(**seeded(input=told, tools=[namespace]))
    assert answered.usage.input_tokens > whole["usage"]["input_tokens"]


class Sum(BaseModel):
    """Adds two digits."""

    a: Literal[1, 2, 3]
    b: Literal[1, 2, 3]


def test_structured_output_has_its_form(client: openai.OpenAI) -> None:
    made = client.responses.parse(**seeded(max_output_tokens=200), text_format=Sum)
    assert isinstance(made.output_parsed, Sum)
    any_object: Any = {"format": {"type": "json_object"}, "verbosity": "low"}
    made = client.responses.create(**seeded(text=any_object))  # type: ignore[assignment]
    assert made.output_text.startswith("{")


def test_thoughts_are_items_of_their_own(start_server: StartServer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(THINKING, "utf-8")
    server = start_server("--chat-template", str(template), "-b", "256", "-ub", "64")
    with client_of(server) as client:
        grammar = {"grammar": 'root ::= "well" "</think>" "\\n\\n" "yes"'}
        options = seeded(extra_body=grammar, max_output_tokens=50)
        whole = client.responses.create(**options)
        thought, message = whole.output
        assert thought.type == "reasoning" and thought.content
        assert thought.content[0].text == "well"
        assert message.type == "message" and whole.output_text == "yes"
        usage = whole.usage
        assert usage and 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        made, kinds = streamed(client, **options)
        assert items_of(made) == items_of(whole) and "reasoning_text.delta" in kinds
        turn = {"role": "user", "content": INPUT}
        told: Any = [turn, *(item.to_dict() for item in whole.output), turn]
        after = client.responses.create(**seeded(input=told))
        assert after.usage and after.usage.input_tokens_details.cached_tokens > 0
        effort: Any = {"effort": "none"}
        plain = seeded(reasoning=effort, extra_body={"grammar": 'root ::= "yes"'})
        made = client.responses.create(**plain)
        assert [item.type for item in made.output] == ["message"] and made.usage and usage
        assert made.usage.input_tokens < usage.input_tokens
    assert server.stop() == 0
    assert "Traceback" not in server.log


def test_what_is_stored_elsewhere_is_refused(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="keeps no answers") as told:
        client.responses.create(**seeded(previous_response_id="resp_1"))
    assert told.value.param == "previous_response_id"
    assert set(ask(server, PATH, {"input": 5})["error"]) == {"message", "type", "param", "code"}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_a_prompt_that_is_too_long_says_so_by_its_code(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as told:
            client.responses.create(**seeded(input=f"{INPUT} " * 1000), stream=stream)
        assert told.value.code == "context_length_exceeded"

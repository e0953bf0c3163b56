"""What answers are made of, however they are cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o import LLM
from edgeh2o.engine.grammar import constrain
from edgeh2o.serving.segment import Segment
from edgeh2o.serving.segments import AnswerParser
from edgeh2o.serving.tools import (
    Tool,
    ToolCall,
    ToolChoice,
    describe_tools,
    grammar_of_call,
    parse_calls,
    write_calls_as_text,
)
from tests.serving.parsing import SCHEMAS, join_segments, parse_answer, segments_of
from tests.tiny_models import TinyModelFactory

CALL = '{"name": "add", "arguments": {"a": 1}}'
FENCED_TEXT = '```json\n{"name": "add", "arguments": {"text": "```\\n\\"x\\"\\n```"}}\n```'
BOTH = {**SCHEMAS, "multiply": {}}
ANSWERS = {
    "hello": [("text", "hello")],
    "<think>hm</think>\n\nyes": [("reasoning", "hm"), ("text", "yes")],
    "<thin": [("text", "<thin")],
    "a < b <tool": [("text", "a < b <tool")],
    f"see\n<tool_call>\n{CALL}\n</tool_call>": [("text", "see\n"), ("call", "add")],
    f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>": [("call", "add")] * 2,
    CALL: [("call", "add")],
    f"[{CALL}, {CALL}]": [("call", "add")] * 2,
    f"```json\n{CALL}\n```": [("call", "add")],
    f"\n```\n[{CALL}, {CALL}]\n```\nDone.": [("call", "add"), ("call", "add"), ("text", "Done.")],
    f"```json\n{CALL}": [("call", "add")],
    f"```json\n{CALL}\n``": [("call", "add")],
    FENCED_TEXT: [("call", "add")],
    '```json\n{"name": "Bob"}\n```': [("text", '```json\n{"name": "Bob"}\n```')],
    "```python\nadd(1)\n```": [("text", "```python\nadd(1)\n```")],
    f"```json\n{CALL} or\n```": [("call", "add"), ("text", " or\n```")],
    f"So:\n```json\n{CALL}\n```": [("text", f"So:\n```json\n{CALL}\n```")],
    '{"not": "a call"}': [("text", '{"not": "a call"}')],
    "<tool_call>nonsense</tool_call>": [("text", "<tool_call>nonsense</tool_call>")],
    "<tool_call>{": [("text", "<tool_call>{")],
    '<tool_call>{"name": "rm"}</tool_call>': [("text", '<tool_call>{"name": "rm"}</tool_call>')],
    f"<think>{CALL}</think>{CALL}": [("reasoning", CALL), ("text", CALL)],
}


@pytest.mark.parametrize("answer", ANSWERS)
@given(cuts=st.lists(st.integers(0, 100), max_size=8))
def test_pieces_do_not_matter(answer: str, cuts: list[int]) -> None:
    assert segments_of(answer, cuts) == ANSWERS[answer]


def test_plain_text_and_begun_thoughts() -> None:
    assert segments_of(
        "<think>a</think>",
        [3],
        is_plain=True,
    ) == [("text", "<think>a</think>")]
    assert segments_of("a</think>b", [3], is_thinking=True) == [("reasoning", "a"), ("text", "b")]
    assert segments_of(CALL, [5], is_call=True) == [("call", "add")]
    assert segments_of(CALL[:-5], [5], is_call=True) == [("call", "add")]  # by a stop text


BEGUN = {
    "": None,
    "{": None,
    '{"name"': None,
    '{"name": "ad': None,
    '{"name": "sub"': None,
    '{"name": "add"': "",
    '{"name":"add",\n': "",
    '{"name": "add", "argum': "",
    '{"name": "add", "arguments"': "",
    '{"name": "add", "arguments": ': "",
    '{"name": "add", "arguments": {': "{",
    '{"name": "add", "arguments": {"a": "x\n, ': '{"a": "x\\n, ',
    '{"name": "add", "arguments": {"a": 1': '{"a": ',
    '{"name": "add", "arguments": {"a": 1}': '{"a": 1}',
}


@pytest.mark.parametrize("text", BEGUN)
def test_a_call_that_is_cut_is_a_call(text: str) -> None:
    """What clients make of an answer that ends by max_tokens: a part of the arguments."""
    parser = AnswerParser(BOTH, is_call=True)
    expected = BEGUN[text]
    found = join_segments([*parser.push(text), *parser.finish(is_cut=True)])
    if expected is None:
        assert found == []
    else:
        assert found == [Segment("call", call=ToolCall("add", expected), is_cut=True)]
    # Where it can be but one function, its name is known from the start.
    alone = AnswerParser(SCHEMAS, is_call=True)
    if '"sub"' not in text:
        found = join_segments([*alone.push(text), *alone.finish(is_cut=True)])
        assert found[0].call == ToolCall("add", expected or "")


@pytest.mark.parametrize(
    "begin", ["<tool_call>", "<tool_call>\n", "", "[", "see\n<tool_call>", "```json\n"]
)
@pytest.mark.parametrize("text", BEGUN)
def test_a_call_of_the_models_own_that_is_cut_is_no_text(text: str, begin: str) -> None:
    parser = AnswerParser(BOTH)
    found = join_segments([*parser.push(begin + text), *parser.finish(is_cut=True)])
    shown = [segment.text for segment in found if segment.call is None]
    calls = [segment for segment in found if segment.call is not None]
    expected = BEGUN[text]
    if expected is not None:
        assert calls == [Segment("call", call=ToolCall("add", expected), is_cut=True)]
    elif '"sub"' in text or not begin + text:  # that is none of the tools
        assert not calls and "".join(shown) == begin + text
        return
    else:
        assert calls == []
    assert "".join(shown) == ("see\n" if begin.startswith("see") else "")


def test_other_texts_that_are_cut_stay() -> None:
    for text in ('{"not": "a call", "b', "<tool_call>nonsense", "[1, 2", "a < b <tool"):
        parser = AnswerParser(SCHEMAS)
        found = [*parser.push(text), *parser.finish(is_cut=True)]
        assert "".join(segment.text for segment in found) == text
    found = parse_answer(f"[{CALL}, {CALL[:20]}", is_cut=True)
    assert [segment.call for segment in found] == [ToolCall("add", '{"a": 1}'), ToolCall("add", "")]
    assert [segment.is_cut for segment in found] == [False, True]


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', '"{\\"a\\": \\"\\ud83d\\"}"'])
def test_half_a_character_can_be_sent(arguments: str) -> None:
    calls = parse_calls(f'{{"name": "add", "arguments": {arguments}}}', ["add"])
    assert calls and calls[0].arguments == '{"a": "\ufffd"}'
    calls[0].arguments.encode("utf-8")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "{", '{"name": "add", "arguments": 5}', "[" * 9999),
        '{"name": "add", "arguments": {"a": NaN}}',  # as Python reads and writes it
        '{"name": "add", "arguments": {"a": [-Infinity]}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": "{\\"a\\": NaN}"}',
        '{"name": "add", "arguments": "a = 1"}',
    ],
)
def test_what_is_no_call(text: str) -> None:
    assert parse_calls(text, ["add"]) is None


def test_tools_without_a_template_for_them() -> None:
    tool = Tool("add", {"type": "object"}, {"type": "function", "function": {"name": "add"}})
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "tool", "content": "4", "tool_call_id": "2"},
    ]
    told = describe_tools(write_calls_as_text(messages), [tool])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be kind.") and '"add"' in told[0]["content"]
    assert json.loads(told[2]["content"].split("\n")[1]) == call["function"]
    responses = "".join(f"<tool_response>\n{n}\n</tool_response>\n" for n in (3, 4))
    assert told[3]["content"] == responses.rstrip()
    assert all(set(message) == {"role", "content"} for message in told)
    schema = json.loads(grammar_of_call([tool], ToolChoice("required")).text)
    assert schema["properties"]["name"] == {"const": "add"}


def accepts(llm: LLM, tools: list[Tool], name: str, arguments: Any) -> bool:
    """Whether a required call to one of the tools may be this one."""
    grammar = grammar_of_call(tools, ToolChoice("required"))
    state = constrain(grammar, llm.model.tokenizer, llm.config.vocab_size)
    call = json.dumps({"name": name, "arguments": arguments})
    for token_id in llm.model.tokenizer.encode(call, add_special=False):
        if not state.allows(token_id):
            return False
        state.accept(token_id)
    return state.is_complete


# As pydantic writes them: a class in a class, and a tree.
ORDER = {
    "$defs": {
        "Item": {
            "type": "object",
            "properties": {"kind": {"$ref": "#/$defs/Kind"}, "default": {"$ref": "#/$defs/Kind"}},
            "required": ["kind"],
        },
        "Kind": {"enum": ["a", "b"]},
    },
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}}},
    "required": ["items"],
}
TREE = {
    "definitions": {
        "Node": {
            "type": "object",
            "properties": {"inner": {"anyOf": [{"$ref": "#/definitions/Node"}, {"type": "null"}]}},
            "required": ["inner"],
        }
    },
    "type": "object",
    "properties": {"root": {"allOf": [{"$ref": "#/definitions/Node"}]}},
    "required": ["root"],
}
LIST = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "path": {"const": {"$ref": "#/x"}}},
}
NAMED = {"$id": "https://example.org/order", **ORDER}
GOOD = {
    "order": {"items": [{"kind": "b", "default": "a"}]},
    "tree": {"root": {"inner": {"inner": None}}},
    "list": {"next": {"next": {}, "path": {"$ref": "#/x"}}},
    "named": {"items": [{"kind": "a"}]},
}
BAD = {
    "order": {"items": [{"kind": "c"}]},
    "tree": {"root": {"inner": 3}},
    "list": {"next": {"next": 3}},
    "named": {"items": [{"kind": 1}]},
}


def test_references_in_parameters_begin_at_the_parameters(tiny_model: TinyModelFactory) -> None:
    schemas = {"order": ORDER, "tree": TREE, "list": LIST, "named": NAMED}
    tools = [Tool(name, schema, {}) for name, schema in schemas.items()]
    with LLM(tiny_model(tensor_type="Q4_0"), threads=1) as llm:
        for tool in tools:
            for offered in ([tool], tools):
                assert accepts(llm, offered, tool.name, GOOD[tool.name]), tool.name
                assert not accepts(llm, offered, tool.name, BAD[tool.name]), tool.name


# What Qwen 3.5 and GLM 4.5 write between the tags, and the arguments.
TAGGED = {
    "\n<function=add>\n<parameter=a>\n12\n</parameter>\n</function>\n": {"a": 12},
    "<function=add></function>": {},
    "\n<function=add>\n<parameter=text>\n 5\nor 6 <b>\n\n</parameter>\n</function>\n": {
        "text": " 5\nor 6 <b>\n"
    },
    "<function=add><parameter=flag>True</parameter><parameter=more>[1]</parameter></function>": {
        "flag": True,
        "more": [1],
    },
    "<function=add><parameter=unit>1</parameter><parameter=name>null</parameter></function>": {
        "unit": "1",
        "name": None,
    },
    "<function=add><parameter=a>many</parameter><parameter=x>{1</parameter></function>": {
        "a": "many",
        "x": "{1",
    },
    "<function=add><parameter=x>1e999</parameter><parameter=y>NaN</parameter></function>": {
        "x": "1e999",
        "y": "NaN",
    },
    "add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n": {"a": 3},
    "add<arg_key>text</arg_key><arg_value>x</arg_value>"
    "<arg_key>a</arg_key><arg_value>4</arg_value>": {
        "text": "x",
        "a": 4,
    },
    "add\n": {},
}


@pytest.mark.parametrize("text", TAGGED)
@given(cuts=st.lists(st.integers(0, 100), max_size=4))
def test_calls_with_arguments_between_tags(text: str, cuts: list[int]) -> None:
    answer = f"<think>x</think>\n\nsee\n<tool_call>{text}</tool_call>"
    assert segments_of(answer, cuts, is_thinking=False) == [
        ("reasoning", "x"),
        ("text", "see\n"),
        ("call", "add"),
    ]
    parser = AnswerParser(SCHEMAS)
    (call,) = [s.call for s in parser.push(f"<tool_call>{text}</tool_call>") if s.call]
    assert json.loads(call.arguments) == TAGGED[text]


@pytest.mark.parametrize(
    "text",
    [
        "<function=rm></function>",
        "<function=add>5</function>",
        "<function=add><parameter=a>5</function>",
        "<function=add></function> and more",
        "add them",
        "add <arg_key>a</arg_key>",
    ],
)
def test_what_is_no_call_between_tags_is_text(text: str) -> None:
    answer = f"<tool_call>{text}</tool_call>"
    assert segments_of(answer, []) == [("text", answer)]


def test_a_tagged_call_that_is_whole_may_lack_its_end_tag() -> None:
    text = "<tool_call><function=add><parameter=a>1</parameter></function>\n"
    for answer, is_cut in ((text, True), (text, False), ("<tool_call>add\n", False)):
        parser = AnswerParser(SCHEMAS)
        parser.push(answer)
        (found,) = parser.finish(is_cut=is_cut)
        assert found.call is not None and not found.is_cut
        json.loads(found.call.arguments)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<function=add>", "{"),
        ("<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=te", '{"a": 1'),
        ("add<arg_key>a</arg_key><arg_value>1</arg_value><arg_", '{"a": 1'),
        ("add", "{"),
        ("add<arg_key>a</arg_key><arg_value>1</arg_value>", '{"a": 1'),
        ("\n<function=ad", None),
        ("ad", None),
    ],
)
def test_a_tagged_call_that_is_cut_has_its_complete_arguments(
    text: str, arguments: str | None
) -> None:
    parser = AnswerParser(SCHEMAS)
    assert parser.push(f"<tool_call>{text}") == []
    cut = None if arguments is None else ToolCall("add", arguments)
    expected = [] if cut is None else [Segment("call", call=cut, is_cut=True)]
    assert parser.finish(is_cut=True) == expected

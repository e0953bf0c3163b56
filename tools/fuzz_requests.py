"""Fuzz target of the server: bodies of requests, up to what the engine is asked for.

python -m tools.fuzz_requests --seconds 60 [--corpus DIR]

An input is a line with the path, then the body. Fields, messages, tools and grammars are read as
the server reads them, grammars are compiled, and messages go through a template. What is wrong with
an input must be an error of the 4xx kind for its client.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from tools.fuzz_loop import instrumented_imports, run_fuzzer

with instrumented_imports():
    from edgeh2o.engine.grammar import compiler_of
    from edgeh2o.errors import EdgeH2OError
    from edgeh2o.sampling_config import SamplingParams
    from edgeh2o.serving.anthropic_request import read_messages_request
    from edgeh2o.serving.api_error import as_api_error
    from edgeh2o.serving.embeddings import read_embedding_request, read_rank_request
    from edgeh2o.serving.fields import Fields, parse_body
    from edgeh2o.serving.infill import read_infill_request
    from edgeh2o.serving.requests import GenerationRequest, read_chat_request, read_text_requests
    from edgeh2o.serving.responses_format import ResponsesFormat
    from edgeh2o.serving.responses_request import read_responses_request
    from edgeh2o.serving.segments import AnswerParser
    from edgeh2o.serving.tools import describe_tools, grammar_of_call, write_calls_as_text
    from edgeh2o.tokenizer import build_tokenizer
    from edgeh2o.tokenizer.chat_template import ChatTemplate

from tests.tokenizer.vocabularies import make_metadata

CHAT, TEXT, INFILL = "/v1/chat/completions", "/v1/completions", "/infill"
MESSAGES, RESPONSES, VECTORS = "/v1/messages", "/v1/responses", "/v1/embeddings"
RANKS = "/v1/rerank"
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
)
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "array", "items": {"type": "string"}}},
    "required": ["a"],
}
_TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": _SCHEMA}}
_ANSWERS = (
    '<think>x</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.add <|constrain|>json<|message|>{"a": 1}',
    "[add(a=1, b=['x', \"y\"]), add(a=None)] and so",
    'add{"a": 1}',
)
_GBNF = r"""root ::= "a" ("b"* | [^\x41-\u00e9]{2,3})? end # note
end ::= "\n" | . root
"""


def make_seeds() -> Iterator[bytes]:
    """Correct bodies of every kind."""
    say: dict[str, Any] = {"messages": [{"role": "user", "content": "the hen"}]}
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 1, "max_tokens": 5}
    calls = [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    yield _write(CHAT, say | sampling | {"stop": ["x"], "stream": True})
    yield _write(CHAT, say | {"logprobs": True, "top_logprobs": 2, "logit_bias": {"5": -3}})
    yield _write(CHAT, say | {"tools": [_TOOL], "tool_choice": "required"})
    named = {"type": "function", "function": {"name": "add"}}
    yield _write(CHAT, say | {"tools": [_TOOL], "tool_choice": named})
    for answer in _ANSWERS:
        told = [{"role": "assistant", "content": answer}]
        yield _write(CHAT, {"messages": told, "tools": [_TOOL]})
    yield _write(CHAT, say | {"grammar": _GBNF})
    yield _write(CHAT, say | {"response_format": {"type": "json_object"}})
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}
    yield _write(CHAT, say | {"response_format": form})
    yield _write(CHAT, say | {"response_format": {"type": "regex", "regex": "(a|b){1,3}"}})
    yield _write(CHAT, say | {"response_format": {"type": "lark", "lark": 'start: "a" | "b"'}})
    yield _write(CHAT, say | {"response_format": {"type": "gbnf", "gbnf": 'root ::= "a" "b"*'}})
    parts = [{"type": "text", "text": "part"}, {"type": "text", "text": "other"}]
    turns = [
        {"role": "developer", "content": "<|user|> be short"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    yield _write(CHAT, {"messages": turns, "stream_options": {"include_usage": True}})
    yield _write(TEXT, {"prompt": "the hen", "logprobs": 2, "max_tokens": 3})
    order = {"samplers": ["top_k", "Temp", "tfs_z"], "mirostat": 2, "mirostat_tau": 5.0}
    yield _write(TEXT, {"prompt": "the", "samplers": "ka", "adaptive_target": 0.3})
    yield _write(TEXT, {"prompt": [1, 2, 3], "echo": False, "n": 1} | order)
    yield _write(TEXT, {"prompt": "the", "samplers": "edskypmxt", "presence_penalty": 1})
    yield _write(TEXT, {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "max_tokens": 0})
    code = {"input_prefix": "the ", "input_suffix": "\n", "prompt": "he", "id_slot": 1}
    yield _write(INFILL, code | {"input_extra": [{"filename": "a", "text": "<|begin|>"}]})
    yield _write(VECTORS, {"input": ["the", [1, 2]], "encoding_format": "base64", "dimensions": 8})
    yield _write(RANKS, {"query": "hen", "documents": ["a", ""], "top_n": 1, "model": "m"})
    yield _write(RANKS, {"query": "hen", "texts": ["a"], "return_text": True})
    yield _write(VECTORS, {"content": [1, "hen"], "embd_normalize": -1, "model": "m"})
    yield from _make_agent_seeds()


def _make_agent_seeds() -> Iterator[bytes]:
    """Turns of an agent, in the two interfaces that have items or blocks."""
    named = {"name": "add", "description": "d"}
    used = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "x", "signature": ""}
    text = {"type": "text", "text": "the hen", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text]}
    say = {"role": "user", "content": "the hen"}
    answer = {"role": "assistant", "content": [thought, text, used]}
    turns = [say, answer, {"role": "user", "content": [result, text]}]
    body = {"system": [text], "max_tokens": 5, "tools": [{**named, "input_schema": _SCHEMA}]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}, {"type": "auto"}):
        chosen = {"tool_choice": {**choice, "disable_parallel_tool_use": True}}
        yield _write(MESSAGES, body | chosen | {"messages": turns})
    form = {"type": "json_schema", "schema": _SCHEMA, "name": "n"}
    options = {"stop_sequences": ["x"], "thinking": {"type": "enabled"}, "top_k": 4}
    asked = {"messages": [say], "max_tokens": 5, "output_config": {"format": form}}
    yield _write(MESSAGES, asked | options)
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be kind"}]},
        say,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    tools = [{"type": "function", **named, "parameters": _SCHEMA}, {"type": "web_search"}]
    body = {"instructions": "be short", "input": items, "max_output_tokens": 5, "tools": tools}
    for value in ("auto", "required", {"type": "function", "name": "add"}):
        yield _write(RESPONSES, body | {"tool_choice": value, "parallel_tool_calls": False})
    said = {"reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "store": True}
    yield _write(RESPONSES, {"input": "the hen", "text": {"format": form}} | said)


def _write(path: str, body: dict[str, Any]) -> bytes:
    return path.encode() + b"\n" + json.dumps(body).encode()


def _read_last_text(fields: Fields, defaults: SamplingParams) -> GenerationRequest:
    return read_text_requests(fields, defaults)[-1]


_READERS = {
    TEXT: _read_last_text,
    MESSAGES: read_messages_request,
    RESPONSES: read_responses_request,
}


class RequestTarget:
    """Reads a body as the server does; the grammars are those of a small vocabulary."""

    def __init__(self) -> None:
        markers = dict.fromkeys(("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep"), 1)
        named = {f"{name}_token_id": i for name, i in markers.items()}
        self._tokenizer = build_tokenizer(make_metadata(**named))
        self._template = ChatTemplate(TEMPLATE, self._tokenizer)
        self._grammars = compiler_of(self._tokenizer, self._tokenizer.vocab_size)

    def __call__(self, content: bytes) -> None:
        path, _, body = content.partition(b"\n")
        try:
            if path == INFILL.encode():
                read_infill_request(parse_body(body), self._tokenizer, SamplingParams())
            elif path == VECTORS.encode():
                read_embedding_request(parse_body(body), is_bare=False)
            elif path == RANKS.encode():
                read_rank_request(parse_body(body))
            else:
                self._read(body, path.decode(errors="replace"))
        except EdgeH2OError as error:
            told = as_api_error(error)
            assert 400 <= told.status < 500, told
            said = told.describe(path.decode(errors="replace"))
            json.dumps(said).encode("utf-8", errors="strict")
            raise

    def _read(self, body: bytes, path: str) -> None:
        fields = parse_body(body)
        request = _READERS.get(path, read_chat_request)(fields, SamplingParams())
        if path == RESPONSES:
            for chunk in ResponsesFormat("m", request, fields).begin():
                json.dumps(chunk, ensure_ascii=False).encode("utf-8", errors="strict")
        grammar = request.grammar
        if request.tool_choice.is_forced:
            grammar = grammar_of_call(request.tools, request.tool_choice)
        if grammar is not None:
            self._grammars.compile(grammar)
        if request.kind == "chat":
            messages = describe_tools(write_calls_as_text(request.messages), request.tools)
            chat = self._template.render(messages, variables=request.template_variables)
            self._template.encode_rendered(chat)
            schemas = {tool.name: tool.parameters for tool in request.tools}
            # Texts of clients, as an answer may repeat them, from a message's beginning on.
            for text in (chat.plain_text, *(m["content"] for m in request.messages)):
                parser = AnswerParser(schemas, is_call=request.tool_choice.is_forced)
                for piece in text[:2000]:
                    parser.push(piece)
                parser.finish(is_cut=len(text) % 2 == 0)


def main() -> int:
    """Command line entry; returns the exit code."""
    logging.disable(logging.ERROR)
    return run_fuzzer(RequestTarget(), make_seeds(), name="fuzz_requests")


if __name__ == "__main__":
    raise SystemExit(main())

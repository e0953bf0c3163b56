"""Answers in the form of OpenAI's Responses API, whole and as the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from .answer_format import AnswerFormat, Chunk, describe_progress, timings
from .answer_parts import Part, PartSequence, Step
from .api_error import ApiError
from .events import Finished, Piece, Progress
from .fields import Fields
from .requests import GenerationRequest
from .tools import NAMESPACE, Tool

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_INCOMPLETE = {"length": "max_output_tokens"}


class ResponsesFormat(AnswerFormat):
    """``response``, and the events that make one."""

    is_done_said = False
    is_named = True

    def __init__(self, model: str, request: GenerationRequest, fields: Fields) -> None:
        """``fields`` are those of the ``request``, of which the answer repeats some."""
        self._id = f"resp_{secrets.token_hex(12)}"
        self._model, self._created_at = model, int(time.time())
        self._echo = _echo(request, fields)
        self._tools = {tool.name: tool for tool in request.tools}
        self._sequence = PartSequence()
        self._n_events = 0

    def begin(self) -> Iterator[Chunk]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def progress(self, progress: Progress) -> Chunk:
        said = self._event("response.in_progress", response=self._response("in_progress"))
        return said | {"prompt_progress": describe_progress(progress)}

    def pieces(self, piece: Piece) -> Iterator[Chunk]:
        for step in self._sequence.take(piece):
            yield from self._show(step)

    def end(self, finished: Finished) -> Iterator[Chunk]:
        for step in list(self._sequence.finish()):  # which part is the last is known then
            yield from self._show(step, finished)
        said = self._finished(finished)
        cost = said["timings"]  # where llama-server has it, too
        yield self._event(f"response.{said['status']}", response=said, timings=cost)

    def fail(self, error: ApiError) -> Iterator[Chunk]:
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        said = self._response("failed", error={"code": code, "message": error.message})
        yield self._event("response.failed", response=said)

    def whole(self, pieces: Sequence[Piece], finished: Finished) -> Chunk:
        self._sequence.collect(pieces)
        return self._finished(finished)

    def _finished(self, finished: Finished) -> Chunk:
        stats, reason = finished.stats, _INCOMPLETE.get(finished.finish_reason)
        parts = self._sequence.parts
        output = [self._item(part, _status(part, parts, finished)) for part in parts]
        return self._response(
            "incomplete" if reason else "completed",
            completed_at=int(time.time()),
            incomplete_details={"reason": reason} if reason else None,
            output=output,
            usage={
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": stats.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": stats.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": self._sequence.n_reasoning_tokens},
                "total_tokens": stats.prompt_tokens + stats.generated_tokens,
            },
            timings=timings(stats),
        )

    def _response(self, status: str, **said: Any) -> Chunk:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "usage": None,
            **self._echo,
            **said,
        }

    def _event(self, kind: str, **said: Any) -> Chunk:
        number, self._n_events = self._n_events, self._n_events + 1
        return {"type": kind, "sequence_number": number, **said}

    def _show(self, step: Step, finished: Finished | None = None) -> Iterator[Chunk]:
        """The events of a step; the answer ends with it where it is ``finished``."""
        part = step.part
        place = {"item_id": _id_of(part), "output_index": part.index}
        if part.kind != "call":
            place["content_index"] = 0
        name = {"text": "output_text", "reasoning": "reasoning_text"}.get(
            part.kind, "function_call_arguments"
        )
        more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        if step.what == "begin":
            item = self._item(part, "in_progress", is_whole=False)
            yield self._event("response.output_item.added", output_index=part.index, item=item)
            if part.kind != "call":
                content = _content(part, is_whole=False)
                yield self._event("response.content_part.added", **place, part=content)
        elif step.what == "add":
            yield self._event(f"response.{name}.delta", **place, delta=step.text, **more)
        else:
            if part.call is not None:
                called = self._name_of(part.call.name)["name"]
                arguments = {"name": called, "arguments": part.text}
                yield self._event(f"response.{name}.done", **place, **arguments)
            else:
                yield self._event(f"response.{name}.done", **place, text=part.text, **more)
                yield self._event("response.content_part.done", **place, part=_content(part))
            item = self._item(part, _status(part, self._sequence.parts, finished))
            yield self._event("response.output_item.done", output_index=part.index, item=item)

    def _name_of(self, name: str) -> dict[str, str]:
        """As clients name the tool that the model called by this name."""
        return _own_name(self._tools[name]) if name in self._tools else {"name": name}

    def _item(self, part: Part, status: str, *, is_whole: bool = True) -> Chunk:
        """A part as an item of the output, whole or as it begins."""
        item: Chunk = {"id": _id_of(part), "status": status}
        content = [_content(part)] if is_whole and part.call is None else []
        if part.call is not None:
            return item | {
                "type": "function_call",
                "call_id": f"call_{part.number}",
                **self._name_of(part.call.name),
                "arguments": part.text if is_whole else "",
            }
        if part.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}


def _echo(request: GenerationRequest, fields: Fields) -> Mapping[str, Any]:
    """What of the request an answer repeats; its instructions, which may be long, it does not."""
    sampling, choice = request.sampling, request.tool_choice
    text, reasoning, metadata = (fields.raw(name) for name in ("text", "reasoning", "metadata"))
    return {
        "background": False,
        "instructions": None,
        "max_output_tokens": None if sampling.max_tokens < 0 else sampling.max_tokens,
        "metadata": metadata if isinstance(metadata, dict) else {},
        "parallel_tool_calls": not request.is_one_call,
        "previous_response_id": None,
        "reasoning": {"effort": (reasoning or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": (text or {}).get("format") or {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") if choice.names else choice.mode,
        "tools": _describe_tools(request.tools),
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


def _own_name(tool: Tool) -> dict[str, str]:
    if tool.namespace is None or tool.own_name is None:
        return {"name": tool.name}
    return {"name": tool.own_name, "namespace": tool.namespace.name}


def _describe_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    described = []
    for namespace, own in groupby(tools, lambda tool: tool.namespace):
        entries = [_describe_tool(tool) for tool in own]
        if namespace is not None:
            said = {"name": namespace.name, "description": namespace.description}
            entries = [{"type": NAMESPACE, **said, "tools": entries}]
        described += entries
    return described


def _describe_tool(tool: Tool) -> dict[str, Any]:
    described = {"description": None, "parameters": dict(tool.parameters)}
    function = {**tool.source["function"], "name": tool.own_name or tool.name}
    return {"type": "function", **described, **function, "strict": tool.is_strict}


def _id_of(part: Part) -> str:
    return f"{_PREFIXES[part.kind]}_{part.number}"


def _status(part: Part, parts: Sequence[Part], finished: Finished | None) -> str:
    """Of a part that has ended: where the answer was cut, the last one is not complete."""
    is_last = finished is not None and finished.finish_reason in _INCOMPLETE and part is parts[-1]
    return "incomplete" if is_last or part.is_cut else "completed"


def _content(part: Part, *, is_whole: bool = True) -> Chunk:
    text = part.text if is_whole else ""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

"""Tells apart what an answer is made of while it is written: reasoning, text, calls of tools."""

from __future__ import annotations

from typing import Literal

from ..engine.stop import overlap
from .bare_calls import begins_call, may_begin_call, parse_bare_calls
from .fenced_calls import FENCE, fence_of, may_be_call, may_be_fence, split_fence
from .harmony import MESSAGE_BEGINS, HarmonyParser
from .segment import Segment
from .streamed_call import StreamedCalls, find_head, find_named_head
from .tagged_calls import FUNCTION_ENDS, Schemas, may_become_tagged_call, parse_tagged_call
from .tools import CALL_BEGINS, CALL_ENDS, ToolCall, may_become_call, parse_calls, parse_cut_call

THINKING_BEGINS, THINKING_ENDS = "<think>", "</think>"


class AnswerParser:
    """Takes the pieces of an answer and gives segments as soon as they are certain.

    What begins as a call with its name and goes on with a JSON object of arguments is one from
    there on, whatever follows: its arguments come in pieces, and end where they are JSON no more.

    ``schemas`` are what may be called: JSON schemas of parameters by the names of functions. With
    ``is_call`` the whole answer is one call.
    ``is_thinking`` says that the prompt has begun the reasoning already, ``is_plain`` that the
    answer is text whatever it holds.
    """

    def __init__(
        self,
        schemas: Schemas | None = None,
        *,
        is_call: bool = False,
        is_plain: bool = False,
        is_thinking: bool = False,
    ) -> None:
        self._schemas = schemas or {}
        self._names = tuple(self._schemas)
        self._is_call = is_call
        self._held = ""
        self._drops_newlines = False  # those between two parts
        self._harmony: HarmonyParser | None = None
        self._state = "text" if is_plain else "thinking" if is_thinking else "start"
        self._streamed: StreamedCalls | None = None
        self._place = ""  # the state in which those were found
        self._opening = CALL_BEGINS  # "" once a call between the tags is told

    def push(self, piece: str) -> list[Segment]:
        """Adds a piece of the answer."""
        if self._harmony is not None:
            return self._harmony.push(piece)
        self._held += piece
        segments: list[Segment] = []
        while self._step(segments):
            pass
        return segments

    def finish(self, *, is_cut: bool = False) -> list[Segment]:
        """What is still held back, at the end of the answer, or where it ``is_cut``.

        A call that had to be written, and one that was begun where the answer is cut, is a call
        with a part of its arguments, as OpenAI has it. Nothing is shown of one without its name.
        """
        if self._harmony is not None:
            return self._harmony.finish(is_cut=is_cut)
        held, self._held = self._held, ""
        if self._streamed is not None:
            segments = self._streamed.finish(is_cut=is_cut)
            return segments + self._finish_behind(self._streamed.rest)
        if self._state == "behind" or (self._state == "call" and not self._opening):
            return self._finish_behind(held)
        if self._state == "fenced":
            return self._finish_fence(held, is_cut=is_cut)
        if self._is_call or self._state in ("json", "call"):
            if calls := self._parse(held, is_cut=is_cut):
                return [Segment("call", call=call) for call in calls]
            if self._state == "json" and (bare := parse_bare_calls(held, self._names)):
                rest = [Segment("text", bare[1])] if bare[1] else []
                return [Segment("call", call=call) for call in bare[0]] + rest
            if self._is_call or is_cut:
                begun = held if self._is_call else held.lstrip().removeprefix("[")
                cut = self._parse_cut(begun)
                if cut is not None:
                    return [Segment("call", call=cut, is_cut=True)]
                if self._may_become_call(begun):
                    return []
            prefix = self._opening if self._state == "call" else ""
            return [Segment("text", prefix + held)] if held else []
        kind: Literal["text", "reasoning"] = "reasoning" if self._state == "thinking" else "text"
        return [Segment(kind, held)] if held else []

    def _finish_behind(self, held: str) -> list[Segment]:
        """What follows calls that were told, but for a part of what ends them."""
        end = CALL_ENDS if self._place == "call" else FENCE if self._place == "fenced" else ""
        is_end = _is_closed(held) or end.startswith(held.strip())
        return [] if is_end else [Segment("text", held)]

    def _finish_fence(self, held: str, *, is_cut: bool) -> list[Segment]:
        """A fence that the answer did not end, or only a part of whose end is there."""
        body = held.removeprefix(fence_of(held))
        if calls := parse_calls(body.rstrip().rstrip(FENCE[0]), self._names):
            return [Segment("call", call=call) for call in calls]
        begun = body.lstrip().removeprefix("[")
        cut = parse_cut_call(begun, self._names) if is_cut else None
        if cut is not None:
            return [Segment("call", call=cut, is_cut=True)]
        is_hidden = is_cut and may_become_call(begun, self._names)
        return [] if is_hidden else [Segment("text", held)]

    def _parse(self, text: str, *, is_cut: bool = False) -> list[ToolCall] | None:
        calls = parse_calls(text, self._names)
        # Only some say themselves where they end.
        is_whole = not is_cut or text.rstrip().endswith(FUNCTION_ENDS)
        if calls or self._state != "call" or not is_whole:
            return calls
        tagged = parse_tagged_call(text, self._schemas)
        return None if tagged is None else [tagged]

    def _parse_cut(self, text: str) -> ToolCall | None:
        cut = parse_cut_call(text, self._names)
        if cut is None and self._is_call and len(self._names) == 1:
            return ToolCall(self._names[0], "")  # only one is possible
        if cut is None and self._state == "call":
            return parse_tagged_call(text, self._schemas, is_cut=True)
        return cut

    def _may_become_call(self, text: str) -> bool:
        return (
            self._is_call
            or may_become_call(text, self._names)
            or (self._state == "call" and may_become_tagged_call(text, self._schemas))
        )

    def _step(self, segments: list[Segment]) -> bool:
        """One step; whether there may be another."""
        if self._streamed is not None:
            return self._take_streamed(segments)
        if self._is_call:
            return self._state != "behind" and self._begin_streamed("forced")
        if self._drops_newlines:
            self._held = self._held.lstrip("\n")
            self._drops_newlines = not self._held
        if self._state == "start":
            return self._begin(segments)
        if self._state == "thinking":
            return self._pass_until(THINKING_ENDS, "reasoning", "text", segments)
        if self._state == "json":
            return self._begin_streamed("json")
        if self._state == "call":
            return self._begin_streamed("call") or self._take_call(segments)
        if self._state == "fenced":
            return self._begin_streamed("fenced") or self._take_fenced(segments)
        if self._state == "behind":
            return self._end_fence()
        if self._state == "text" and self._names:
            return self._pass_until(CALL_BEGINS, "text", "call", segments)
        if self._state == "text" and self._held:
            segments.append(Segment("text", self._held))
            self._held = ""
        return False

    def _begin(self, segments: list[Segment]) -> bool:
        """The first characters tell what it is."""
        text = self._held.lstrip()
        if text.startswith(MESSAGE_BEGINS):
            self._harmony = HarmonyParser(self._names)
            segments += self._harmony.push(text)
            return False
        if text.startswith(THINKING_BEGINS):
            self._held = text.removeprefix(THINKING_BEGINS)
            self._state = "thinking"
            return True
        if not text or THINKING_BEGINS.startswith(text) or MESSAGE_BEGINS.startswith(text):
            return False
        if self._names and (text.startswith(("{", "[")) or begins_call(text, self._names)):
            self._state = "json"
            return True
        if self._names and fence_of(text):
            self._held, self._state = text, "fenced"
            return True
        if may_begin_call(text, self._names) or (self._names and may_be_fence(text)):
            return False
        self._state = "text"
        return True

    def _begin_streamed(self, place: str) -> bool:
        """Whether a call begins here whose arguments may be told in pieces."""
        text = self._held
        if place == "fenced":
            text = text.removeprefix(fence_of(text))
            if not may_be_call(text, self._names):
                return False
        bare = text.lstrip()
        is_list = bare.startswith("[") and place != "forced"
        is_bare = place == "json" and not bare.startswith(("[", "{"))
        text = bare.removeprefix("[") if is_list else text
        head = (find_named_head if is_bare else find_head)(text, self._names)
        if head is None:
            return False
        name, begin = head
        self._streamed = StreamedCalls(name, self._names, is_list=is_list, is_bare=is_bare)
        self._held, self._place = text[begin:], place
        return True

    def _take_streamed(self, segments: list[Segment]) -> bool:
        assert self._streamed is not None, "they have begun"
        segments += self._streamed.push(self._held)
        self._held = ""
        if not self._streamed.is_done:
            return False
        self._held, self._streamed = self._streamed.rest, None
        if self._place == "call":  # there may be more of them before the tag
            self._state, self._opening = "call", ""
        elif self._place in ("fenced", "forced"):
            self._state = "behind"
        else:
            self._state, self._drops_newlines = "text", True
        return True

    def _end_fence(self) -> bool:
        """What ends a fence behind its calls; anything else is text."""
        after = self._held.lstrip()
        if FENCE.startswith(after) and after != FENCE:
            return False
        if after.startswith(FENCE):
            self._held = after.removeprefix(FENCE)
        self._state, self._drops_newlines = "text", True
        return True

    def _take_fenced(self, segments: list[Segment]) -> bool:
        """Once the fence ends; what stands in it may turn out to be text before."""
        body = self._held.removeprefix(fence_of(self._held))
        calls, after = None, ""
        if may_be_call(body, self._names):
            try:
                split = split_fence(body)
            except ValueError:
                split = body, ""
            if split is None:
                return False
            written, after = split
            calls = parse_calls(written, self._names)
        if calls:
            segments += [Segment("call", call=call) for call in calls]
            self._held, self._drops_newlines = after, True
        self._state = "text"
        return True

    def _pass_until(
        self, end: str, kind: Literal["text", "reasoning"], after: str, segments: list[Segment]
    ) -> bool:
        before, found, rest = self._held.partition(end)
        if not found:
            n_held = overlap(before, end)
            before, rest = before[: len(before) - n_held], before[len(before) - n_held :]
        if before:
            segments.append(Segment(kind, before))
        self._held = rest
        if found:
            self._state = after
            self._drops_newlines = kind == "reasoning"
        return bool(found)

    def _take_call(self, segments: list[Segment]) -> bool:
        inside, found, rest = self._held.partition(CALL_ENDS)
        if not found:
            return False
        calls = self._parse(inside)
        is_behind = not self._opening and _is_closed(inside)
        if calls:
            segments += [Segment("call", call=call) for call in calls]
        elif not is_behind:
            segments.append(Segment("text", self._opening + inside + CALL_ENDS))
        self._held, self._state, self._opening = rest, "text", CALL_BEGINS
        self._drops_newlines = bool(calls) or is_behind
        return True


def _is_closed(text: str) -> bool:
    """Whether nothing but ends of objects stands there."""
    return not text.strip("} \t\r\n")

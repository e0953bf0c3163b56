"""Answers as parts, and streams that make the same of them as a whole answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.engine.stats import GenerationStats
from edgeh2o.serving.answer_format import AnswerFormat
from edgeh2o.serving.answer_parts import Part, PartSequence, Step
from edgeh2o.serving.anthropic_format import MessagesFormat
from edgeh2o.serving.events import Finished, Piece, Progress
from edgeh2o.serving.fields import Fields
from edgeh2o.serving.responses_format import ResponsesFormat
from edgeh2o.serving.segment import Segment, join_calls
from edgeh2o.serving.tools import ToolCall
from tests.serving.answering import request_of
from tests.serving.parsing import cut

STATS = GenerationStats(
    model="m",
    isa="scalar",
    threads=1,
    attention={},
    batch_size=1,
    chunk_size=1,
    context_size=1,
    cache_type="f32",
    attention_precision="f32",
    seed=1,
    prompt_tokens=9,
    cached_tokens=4,
    generated_tokens=5,
    load_s=0.0,
    prefill_s=0.0,
    ttft_s=0.0,
    decode_s=0.0,
    prefill_tps=None,
    decode_tps=None,
    peak_rss_bytes=0,
    pairs_computed=0,
    pairs_dense=0,
)
TEXTS = st.text("ab \n", min_size=1, max_size=4)
SEGMENTS = st.one_of(
    st.builds(Segment, st.just("text"), TEXTS),
    st.builds(Segment, st.just("reasoning"), TEXTS),
    st.builds(
        lambda arguments: Segment("call", call=ToolCall("add", arguments)),
        st.sampled_from(['{"a": 1}', "{}"]),
    ),
)


def in_pieces(segment: Segment, cuts: Sequence[int]) -> list[Segment]:
    """A call whose arguments come in several segments; others as they are."""
    if segment.call is None or not cuts:
        return [segment]
    pieces = [ToolCall(segment.call.name, text) for text in cut(segment.call.arguments, cuts)]
    return [
        Segment("call", call=call, is_open=call is not pieces[-1], goes_on=call is not pieces[0])
        for call in pieces
    ]


GROUPS = st.builds(in_pieces, SEGMENTS, st.lists(st.integers(0, 8), max_size=2))
PIECES = st.lists(
    st.builds(
        lambda segments, is_token: Piece(tuple(segments), None, 1 if is_token else None),
        st.lists(GROUPS, max_size=3).map(lambda groups: [s for group in groups for s in group]),
        st.booleans(),
    ),
    max_size=6,
)
ENDS = st.sampled_from(["stop", "length"])


def steps_of(pieces: Sequence[Piece]) -> tuple[list[Step], list[Part]]:
    sequence = PartSequence()
    steps = [step for piece in pieces for step in sequence.take(piece)]
    return [*steps, *sequence.finish()], sequence.parts


@given(PIECES)
def test_parts_begin_and_end_one_after_the_other(pieces: list[Piece]) -> None:
    steps, parts = steps_of(pieces)
    assert [part.index for part in parts] == list(range(len(parts)))
    groups = [(part, list(of)) for part, of in itertools.groupby(steps, lambda s: s.part.index)]
    assert [index for index, _ in groups] == list(range(len(parts)))
    for index, of_part in groups:
        assert [step.what for step in of_part] == ["begin", *["add"] * (len(of_part) - 2), "end"]
        assert "".join(step.text for step in of_part) == parts[index].text
    segments = [segment for piece in pieces for segment in piece.segments]
    calls = join_calls(segments)
    assert [part.call for part in parts if part.call is not None] == calls
    for kind in ("text", "reasoning"):
        written = "".join(segment.text for segment in segments if segment.kind == kind)
        shown = "".join(part.text for part in parts if part.kind == kind)
        if kind == "reasoning" or not calls:
            assert shown == written
        assert "".join(shown.split()) == "".join(written.split())
    assert not calls or all(part.text.strip() for part in parts if part.kind == "text")


def events_of(form: AnswerFormat, pieces: Sequence[Piece], end: Finished) -> list[dict[str, Any]]:
    events = [*form.begin(), *form.begin_reading(Progress(0, 5, 4))]
    events += [event for piece in pieces for event in form.pieces(piece)]
    return [*events, *form.end(end)]


def without_ids(value: Any) -> Any:
    """Nor times, which may be those of the next second."""
    left_out = ("id", "call_id", "created_at", "completed_at")
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name not in left_out}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def finished(pieces: Sequence[Piece], reason: str) -> Finished:
    calls = [segment for piece in pieces for segment in piece.segments if segment.call is not None]
    return Finished("tool_calls" if calls else reason, STATS)


@given(PIECES, ENDS)
def test_the_events_of_a_message_make_it(pieces: list[Piece], reason: str) -> None:
    end = finished(pieces, reason)
    whole = MessagesFormat("m").whole(pieces, end)
    made: dict[str, Any] = {}
    texts: dict[int, str] = {}
    for event in events_of(MessagesFormat("m"), pieces, end):
        kind = event["type"]
        if kind == "message_start":
            made = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(made["content"])
            made["content"].append(event["content_block"])
            texts[event["index"]] = ""
        elif kind == "content_block_delta":
            (name,) = event["delta"].keys() - {"type"}
            texts[event["index"]] += event["delta"][name]
        elif kind == "message_delta":
            made |= {**event["delta"], "usage": event["usage"]}
    for block, text in zip(made["content"], texts.values(), strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        else:
            block[block["type"]] = text
    assert without_ids(made) == without_ids(whole)
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 9


@given(PIECES, ENDS)
def test_the_events_of_a_response_make_it(pieces: list[Piece], reason: str) -> None:
    end, fields = finished(pieces, reason), Fields({})
    whole = ResponsesFormat("m", request_of("x"), fields).whole(pieces, end)
    events = events_of(ResponsesFormat("m", request_of("x"), fields), pieces, end)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: dict[int, Any] = {}
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items[event["output_index"]] = event["item"]
        elif kind == "response.content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind.endswith(".delta"):
            item = items[event["output_index"]]
            assert event["item_id"] == item["id"]
            place = item if item["type"] == "function_call" else item["content"][0]
            place["text" if "text" in place else "arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            told = items[event["output_index"]]
            assert event["item"] == told | {"status": event["item"]["status"]}
            items[event["output_index"]] = event["item"]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == list(items.values())
    assert without_ids(last) == without_ids(whole)


def test_a_call_that_is_cut_is_not_complete() -> None:
    ended = Segment("call", call=ToolCall("add", '{"a'), is_cut=True)
    form = ResponsesFormat("m", request_of("x"), Fields({}))
    events = events_of(form, [Piece((ended,))], Finished("length", STATS))
    done = next(event for event in events if event["type"] == "response.output_item.done")
    assert (done["item"]["status"], done["item"]["arguments"]) == ("incomplete", '{"a')
    assert events[-1]["response"]["output"] == [done["item"]]
    (block,) = MessagesFormat("m").whole([Piece((ended,))], Finished("length", STATS))["content"]
    assert (block["name"], block["input"]) == ("add", {})

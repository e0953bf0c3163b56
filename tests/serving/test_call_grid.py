"""Where calls end depends on the prompt alone, wherever its reading begins."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.serving.call_grid import CallGrid, PromptShape, ReadPlaces

GRID = CallGrid(chunk=256, least_last=64)


def whole(shape: PromptShape) -> list[int]:
    return GRID.ends(0, shape.n_tokens, shape, 0, is_last=True)


def test_calls_are_chunks_with_an_end_before_the_question() -> None:
    assert whole(PromptShape(200)) == [200]
    assert whole(PromptShape(256)) == [256]
    assert whole(PromptShape(257)) == [257]  # the last call has 64 tokens at least
    assert whole(PromptShape(600)) == [256, 512, 600]
    assert whole(PromptShape(600, 20)) == [256, 512, 580, 600]
    assert whole(PromptShape(600, 70)) == [256, 512, 600]  # too near the chunk's beginning
    assert whole(PromptShape(200, 20)) == [200]  # a short prompt is one call
    assert whole(PromptShape(1200, 400)) == [256, 512, 768, 1024, 1200]
    assert whole(PromptShape(1200, 500)) == [256, 512, 700, 956, 1200]
    assert whole(PromptShape(1000, 290)) == [256, 512, 710, 1000]


@given(
    n_tokens=st.integers(1, 3000),
    n_question=st.integers(0, 3000),
    data=st.data(),
)
def test_slices_and_beginnings_change_nothing(
    n_tokens: int, n_question: int, data: st.DataObject
) -> None:
    shape = PromptShape(n_tokens, min(n_question, n_tokens))
    ends = whole(shape)
    assert ends[-1] == n_tokens
    assert all(0 < end - begin < 256 + 64 for begin, end in pairwise([0, *ends]))
    position = begin = data.draw(st.sampled_from([0, *ends[:-1]]), label="begin")
    read = []
    slices = data.draw(st.sets(st.integers(begin + 1, n_tokens), max_size=6), label="slices")
    for edge in sorted({*slices, n_tokens}):
        if position < edge:
            read += GRID.ends(position, edge, shape, 0, is_last=edge == n_tokens)
            position = read[-1] if read else begin
    assert read == [end for end in ends if end > begin]


@given(first=st.integers(300, 3000), second=st.integers(300, 3000), data=st.data())
def test_what_is_allowed_lies_on_the_way_of_a_whole_read(
    first: int, second: int, data: st.DataObject
) -> None:
    one = PromptShape(first, data.draw(st.integers(0, 200)))
    other = PromptShape(second, data.draw(st.integers(0, 200)))
    marks = (0, *whole(one)[:-1])
    question = GRID.question_of(one, 0)
    places = ReadPlaces(marks, (0,), () if question is None else (question,))
    for mark in marks:
        is_on_the_way = mark in (0, *whole(other)[:-1])
        assert GRID.allows(mark, other, places) == is_on_the_way


def test_a_turn_that_goes_on_has_a_grid_of_its_own() -> None:
    shape = PromptShape(2000, 30)
    assert GRID.ends(700, 2000, shape, 700, is_last=True)[:2] == [956, 1212]
    places = ReadPlaces((0, 256, 700, 956), (0, 700), (600,))
    assert GRID.allows(956, shape, places)  # the question of the turn before is history
    assert not GRID.allows(640, shape, ReadPlaces((0, 256, 600), (0,), (600,)))
    assert places.up_to(690) == ReadPlaces((0, 256), (0,), (600,))


@pytest.mark.parametrize("least", [0, 64])
def test_a_runner_of_one_chunk_a_call_has_no_longer_one(least: int) -> None:
    grid = CallGrid(256, least)
    ends = grid.ends(0, 520, PromptShape(520), 0, is_last=True)
    assert ends == ([256, 520] if least else [256, 512, 520])

"""Stop texts are found across pieces, and nothing of them leaks out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o.engine.stop import StopMatcher


def _feed(matcher: StopMatcher, pieces: list[str]) -> str:
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish()


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "stopped"),
    [
        ((), ["a", "b"], "ab", False),
        (("END",), ["one E", "N", "D two"], "one ", True),
        (("END",), ["one E", "N", "d two"], "one ENd two", False),
        (("END",), ["E", "N"], "EN", False),
        (("bc", "b"), ["abc"], "a", True),
        (("later", "now"), ["now or later"], "", True),
        (("aab",), ["aaa", "ab"], "aa", True),
        (("\n\n",), ["x\n", "\ny"], "x", True),
    ],
)
def test_cases(stops: tuple[str, ...], pieces: list[str], expected: str, stopped: bool) -> None:
    matcher = StopMatcher(stops)
    assert _feed(matcher, pieces) == expected
    assert matcher.stopped is stopped


def test_text_is_held_back_no_longer_than_needed() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abE") == "ab"
    assert matcher.push("x") == "Ex"
    assert matcher.push("EN") == ""
    assert matcher.push("EN") == "EN"


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a"
    assert matcher.push("c") == ""
    assert matcher.finish() == ""


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_pieces_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    """A match ends with the earliest character that completes any stop text."""
    whole = "".join(pieces)
    expected = whole
    for end in range(len(whole) + 1):
        starts = [whole[:end].find(stop) for stop in stops if stop in whole[:end]]
        if starts:
            expected = whole[: min(starts)]
            break
    one_by_one = StopMatcher(stops)
    assert _feed(one_by_one, list(whole)) == expected
    matcher = StopMatcher(stops)
    text = _feed(matcher, pieces)
    assert not any(stop in text for stop in stops)
    assert matcher.stopped == any(stop in whole for stop in stops)

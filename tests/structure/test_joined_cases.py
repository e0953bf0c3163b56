"""Cases that are joined in one test all run, and one that fails is named."""

from __future__ import annotations

import pytest

from tests.joined_cases import for_each


def test_every_case_runs_with_the_fixtures_of_the_test() -> None:
    seen = []

    @for_each("n, name", [(1, "a"), (2, "b")])
    def joined(isa: str, n: int, name: str) -> None:
        seen.append((isa, n, name))

    joined(isa="scalar")
    assert seen == [("scalar", 1, "a"), ("scalar", 2, "b")]


@pytest.mark.parametrize("value", [5, 6])
@for_each("n", [1, 2])
def test_it_stands_beside_parameters(value: int, n: int, tmp_path: object) -> None:
    assert value > n and tmp_path


def test_the_case_that_fails_is_named() -> None:
    @for_each("n", [1, 2, 3])
    def joined(n: int) -> None:
        assert n != 2, "not two"

    with pytest.raises(AssertionError, match=r"with \{'n': 2\}: not two"):
        joined()


def test_no_case_is_left_out_in_silence() -> None:
    @for_each("n", [1, 2])
    def joined(n: int) -> None:
        if n == 1:
            pytest.skip("not one")

    with pytest.raises(AssertionError, match=r"\{'n': 1\} is skipped"):
        joined()
    with pytest.raises(ValueError, match="no cases of n"):
        for_each("n", [])

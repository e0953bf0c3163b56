"""The context of a prompt and its answer, and prompts that are too long for it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from edgeh2o.engine.context_size import choose_context
from edgeh2o.errors import ContextLengthError
from edgeh2o.host import memory
from tests.engine.fakes import make_plan


@pytest.mark.parametrize(
    ("n_prompt_tokens", "max_tokens", "requested", "trained", "expected"),
    [
        (10, 100, None, 8192, 4096),
        (10, 100, None, 2048, 2048),
        (5000, 100, None, 8192, 5120),
        (5000, 120, None, 8192, 5120),
        (5000, 121, None, 8192, 5376),
        (5000, -1, None, 8192, 6144),
        (8192, -1, None, 8192, 8192),
        (8000, 5000, None, 8192, 8192),
        (10, -1, 0, 8192, 8192),
        (10, -1, 100, 8192, 100),
        (10, -1, 9000, 8192, 9000),
        (100, 50, 100, 8192, 100),
    ],
)
def test_choose_context(
    n_prompt_tokens: int, max_tokens: int, requested: int | None, trained: int, expected: int
) -> None:
    plan = make_plan(trained=trained, context_size=requested)
    assert choose_context(plan, n_prompt_tokens, max_tokens) == expected


@pytest.mark.parametrize(
    ("n_prompt_tokens", "requested", "max_tokens", "message"),
    [
        (101, 100, 10, "101 tokens and the context holds 100; use -c 111 or more"),
        (101, 100, -1, "use -c 1125 or more"),
        (8190, 100, -1, "use -c 8192 or more"),
        (8193, None, 10, "holds 8192; shorten it, or use -c 8203 to read it all the same, beyond"),
        (8193, 0, -1, "shorten it, or use -c 9217 .* beyond the 8192 positions that the model"),
        (9001, 9000, 10, "context holds 9000; shorten it, or use -c 9011"),
    ],
)
def test_prompt_longer_than_the_context(
    n_prompt_tokens: int, requested: int | None, max_tokens: int, message: str
) -> None:
    """The context that is named leaves room for the answer."""
    with pytest.raises(ContextLengthError, match=message) as caught:
        choose_context(make_plan(context_size=requested), n_prompt_tokens, max_tokens)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.n_tokens, copy.limit) == (n_prompt_tokens, caught.value.limit)
    assert str(copy) == str(caught.value)


@pytest.mark.parametrize(
    ("n_prompt_tokens", "max_tokens", "expected"),
    [(10, 100, 1536), (1000, 100, 1536), (1500, 100, 1536), (1536, -1, 1536)],
)
def test_a_context_that_memory_holds(n_prompt_tokens: int, max_tokens: int, expected: int) -> None:
    plan = replace(make_plan(), most_context=1536)
    assert choose_context(plan, n_prompt_tokens, max_tokens) == expected


@pytest.mark.parametrize(
    ("limit", "cure"), [("", "free"), ("of addresses", "raise the limit of addresses,")]
)
def test_a_prompt_longer_than_memory_holds(
    monkeypatch: pytest.MonkeyPatch, limit: str, cure: str
) -> None:
    monkeypatch.setattr(memory, "binding_limit", lambda: limit)
    plan = replace(make_plan(), most_context=1536)
    message = f"1537 tokens .* holds 1536; memory has no room for more: shorten it, {cure}"
    with pytest.raises(ContextLengthError, match=message):
        choose_context(plan, 1537, 10)
    assert choose_context(plan, 1537, 10, goes_on=True) == 1536

"""How a prompt is cut into prefill calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeh2o import _core
from edgeh2o.runners.base import Runner
from edgeh2o.runners.runner_calls import plan_calls
from tests.model.model_pair import load_pair, random_tokens, relative_error
from tests.tiny_models import TinyModelFactory


@dataclass
class Sizes:
    batch_size: int
    chunk_size: int


def calls(first: int, end: int, sizes: Sizes) -> list[tuple[int, int]]:
    return [(call.start, call.stop) for call in plan_calls(first, end, cast(Runner, sizes))]


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, 4096, [(0, 4096)]),
        (0, 4097, [(0, 3840), (3840, 4097)]),
        (0, 4352, [(0, 4096), (4096, 4352)]),
        (0, 8195, [(0, 4096), (4096, 7936), (7936, 8195)]),
        (100, 4200, [(100, 3940), (3940, 4200)]),
        (7, 7, []),
    ],
)
def test_examples(first: int, end: int, expected: list[tuple[int, int]]) -> None:
    assert calls(first, end, Sizes(batch_size=4096, chunk_size=256)) == expected


def test_a_batch_of_one_chunk_has_nothing_to_give() -> None:
    assert calls(0, 257, Sizes(256, 256)) == [(0, 256), (256, 257)]


@given(st.integers(0, 300), st.integers(1, 500), st.integers(1, 40), st.integers(1, 6))
def test_rules(first: int, n_tokens: int, chunk_size: int, n_chunks: int) -> None:
    sizes = Sizes(n_chunks * chunk_size, chunk_size)
    found = calls(first, first + n_tokens, sizes)
    assert [begin for begin, _ in found] == [first, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == first + n_tokens
    assert all(0 < stop - begin <= sizes.batch_size for begin, stop in found)
    assert all((stop - begin) % chunk_size == 0 for begin, stop in found[:-1])
    assert len(found) == -(-n_tokens // sizes.batch_size)
    if n_chunks > 1 and len(found) > 1:
        assert found[-1][1] - found[-1][0] >= chunk_size


def test_a_dense_tail_is_whole_whatever_the_length(tiny_model: TinyModelFactory) -> None:
    """A prompt of one token more than a batch: its last 8 tokens read everything all the same."""
    pair = load_pair(tiny_model, tensor_type="F32")
    tokens = random_tokens(129)
    tail = 8
    policy = _core.h2o_policy(4, 4, tail=tail)
    session = pair.session(policy, batch_size=128, chunk_size=32)
    for call in plan_calls(0, len(tokens), cast(Runner, Sizes(128, 32))):
        session.prefill(tokens[call], is_last=call.stop == len(tokens))
    n_pairs = session.pairs_computed
    whole = pair.session(_core.h2o_policy(4, 4, tail=tail), batch_size=160, chunk_size=32)
    logits = whole.prefill(tokens, is_last=True)
    assert logits is not None
    assert n_pairs == whole.pairs_computed
    assert relative_error(session.decode(5), whole.decode(5)) < 1e-5
    assert np.isfinite(logits).all()

"""Runs of the C++ decoder that must equal each other, and its exact counters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgeh2o import _core
from tests.model.model_pair import (
    CHUNK_SIZE,
    HEAVY,
    LOCAL,
    MAX_CONTEXT,
    ModelPair,
    layers_of,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
    split,
)
from tests.reference.pairs import pairs_chunked, pairs_dense
from tests.tiny_models import TinyModelFactory

ATTENTION = ["dense", "h2o"]
# Another order of additions moves a few values over a rounding boundary: float16 keys and values,
# and with quantised weights 8-bit activations (see test_decoder_oracle).
ORDER_TOLERANCE = {"F32": 5e-4, "Q4_0": 2e-2}


@pytest.fixture(params=["F32", "Q4_0"])
def tensor_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pair(tensor_type: str, tiny_model: TinyModelFactory) -> ModelPair:
    return load_pair(tiny_model, tensor_type=tensor_type)


@pytest.fixture
def order_tolerance(tensor_type: str) -> float:
    return ORDER_TOLERANCE[tensor_type]


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Puts the number of threads back after a test that changes it."""
    n_threads = _core.num_threads()
    yield
    _core.set_num_threads(n_threads)


def h2o() -> _core.SparsePolicy:
    return _core.h2o_policy(LOCAL, HEAVY)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    "lengths",
    [[128, 128], [64, 64, 64, 64], [192, 64], [64, 192], [128, 100], [128, 64, 1]],
)
def test_several_calls_equal_one(pair: ModelPair, attention: str, lengths: list[int]) -> None:
    _, make_policy = layers_of(attention)
    tokens = random_tokens(sum(lengths))
    expected = prefill(pair.session(make_policy()), tokens)
    session = pair.session(make_policy(), batch_size=max(lengths))
    logits = prefill(session, *split(tokens, lengths))
    assert relative_error(logits, expected) < 1e-6
    assert session.position == sum(lengths)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("n_tokens", [CHUNK_SIZE, 2 * CHUNK_SIZE + 128, 2 * CHUNK_SIZE - 1])
def test_last_logits_are_those_of_the_last_row(
    pair: ModelPair, attention: str, n_tokens: int, order_tolerance: float
) -> None:
    _, make_policy = layers_of(attention)
    session = pair.session(make_policy())
    tokens = random_tokens(n_tokens)
    expected = prefill(session, tokens)[-1]
    session.reset()
    logits = session.prefill(tokens, is_last=True)
    assert logits.shape == expected.shape
    assert relative_error(logits, expected) < order_tolerance
    session.reset()
    assert session.prefill(tokens, is_last=False) is None


def test_row_logits_come_in_any_blocks_until_the_next_call(pair: ModelPair) -> None:
    session = pair.session(h2o())
    tokens = random_tokens(2 * CHUNK_SIZE + 9)
    expected = prefill(session, tokens)
    for first, n_rows in [(0, 1), (CHUNK_SIZE - 3, 7), (len(tokens) - 1, 1), (0, len(tokens))]:
        rows = session.row_logits(first, n_rows)
        assert relative_error(rows, expected[first : first + n_rows]) < 1e-6
    for first, n_rows in [(0, len(tokens) + 1), (len(tokens), 1), (5, 0), (2**63, 2**63)]:
        with pytest.raises(ValueError, match=r"not among the \d+ of the latest prefill|at most"):
            session.row_logits(first, n_rows)
    session.decode(7)
    with pytest.raises(ValueError, match="not among the 0 of the latest prefill call"):
        session.row_logits(0, 1)
    session.reset()
    with pytest.raises(ValueError, match="not among the 0 of the latest prefill call"):
        session.row_logits(0, 1)


@pytest.mark.parametrize("attention", ATTENTION)
def test_repeated_prefills_are_identical(pair: ModelPair, attention: str) -> None:
    _, make_policy = layers_of(attention)
    session = pair.session(make_policy())
    tokens, other = random_tokens(2 * CHUNK_SIZE + 50), random_tokens(300, seed=1)
    memory = dict(session.memory_bytes)
    expected = prefill(session, tokens)
    for _ in range(2):
        prefill(session, other)
        session.decode(7)
        np.testing.assert_array_equal(prefill(session, tokens), expected)
    assert dict(session.memory_bytes) == memory
    np.testing.assert_array_equal(prefill(pair.session(make_policy()), tokens), expected)


@pytest.mark.parametrize("attention", ATTENTION)
def test_results_do_not_depend_on_the_number_of_threads(
    pair: ModelPair, attention: str, restored_threads: None
) -> None:
    _, make_policy = layers_of(attention)
    tokens = random_tokens(3 * CHUNK_SIZE + 17)
    results = []
    for n_threads in (1, 2, 3):
        _core.set_num_threads(n_threads)
        session = pair.session(make_policy())
        logits = prefill(session, tokens)
        results.append(np.concatenate([logits, [session.decode(5), session.decode(9)]]))
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


def test_decode_equals_prefill_of_the_longer_prompt(
    pair: ModelPair, order_tolerance: float
) -> None:
    session = pair.session(_core.dense_policy())
    tokens = random_tokens(CHUNK_SIZE + 30)
    expected = prefill(session, tokens)
    prefill(session, tokens[:-10])
    for position in range(len(tokens) - 10, len(tokens)):
        logits = session.decode(int(tokens[position]))
        assert relative_error(logits, expected[position]) < order_tolerance


@pytest.mark.parametrize("n_tokens", [1, CHUNK_SIZE - 1, CHUNK_SIZE])
def test_one_chunk_takes_the_dense_path(pair: ModelPair, n_tokens: int) -> None:
    tokens = random_tokens(n_tokens)
    expected = prefill(pair.session(_core.dense_policy()), tokens)
    np.testing.assert_array_equal(prefill(pair.session(h2o()), tokens), expected)


@pytest.mark.parametrize(("local", "heavy"), [(MAX_CONTEXT, 0), (100, 540), (0, MAX_CONTEXT)])
def test_memory_for_everything_equals_dense(
    pair: ModelPair, local: int, heavy: int, order_tolerance: float
) -> None:
    tokens = random_tokens(4 * CHUNK_SIZE + 5)
    expected = prefill(pair.session(_core.dense_policy()), tokens)
    logits = prefill(pair.session(_core.h2o_policy(local, heavy)), tokens)
    assert relative_error(logits, expected) < order_tolerance


def test_dense_logits_do_not_depend_on_the_chunk_size(
    pair: ModelPair, order_tolerance: float
) -> None:
    tokens = random_tokens(300)
    expected = prefill(pair.session(_core.dense_policy(), chunk_size=320), tokens)
    for chunk_size in (32, 80, 160):
        session = pair.session(_core.dense_policy(), chunk_size=chunk_size)
        assert relative_error(prefill(session, tokens), expected) < order_tolerance


def test_sparse_attention_changes_the_logits_after_the_first_chunk(pair: ModelPair) -> None:
    tokens = random_tokens(3 * CHUNK_SIZE)
    dense = prefill(pair.session(_core.dense_policy()), tokens)
    sparse = prefill(pair.session(h2o()), tokens)
    np.testing.assert_array_equal(sparse[:CHUNK_SIZE], dense[:CHUNK_SIZE])
    assert relative_error(sparse[2 * CHUNK_SIZE :], dense[2 * CHUNK_SIZE :]) > 0.1


@pytest.mark.parametrize("lengths", [[20], [64], [65], [127], [256], [200, 56], [128, 128, 17]])
def test_pair_counts_are_exact(tiny_model: TinyModelFactory, lengths: list[int]) -> None:
    pair = load_pair(tiny_model, tensor_type="Q4_0")
    tokens = random_tokens(sum(lengths))
    batch_size = max(lengths)
    for policy, memory_size in ((_core.dense_policy(), MAX_CONTEXT), (h2o(), LOCAL + HEAVY)):
        capacity = -(-batch_size // CHUNK_SIZE) * CHUNK_SIZE
        session = pair.session(policy, batch_size=capacity)
        prefill(session, *split(tokens, lengths))
        counts = (session.pairs_computed, session.pairs_dense)
        expected = pairs_chunked(
            len(tokens), chunk_size=CHUNK_SIZE, memory_size=memory_size, batch_size=batch_size
        )
        assert counts == (expected, pairs_dense(len(tokens)))
        session.decode(3)
        assert (session.pairs_computed, session.pairs_dense) == counts
        session.reset()
        assert (session.pairs_computed, session.pairs_dense, session.position) == (0, 0, 0)

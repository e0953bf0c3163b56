"""The guard of the sparse attention: what it measures, and memory sets that it has read again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.runners.runner_calls import attention_error
from tests.ops.attention_case import Shape, head_major, token_major
from tests.reference.dense import causal_attention
from tests.reference.qkv import random_qkv

CHUNK, TAIL, N_TOKENS, N_LAYERS = 32, 20, 230, 3
SHAPE = Shape(n_kv_heads=2, group=3, head_dim=16)

pytestmark = pytest.mark.usefixtures("isa")


def make_policy() -> _core.SparsePolicy:
    return _core.h2o_policy(9, 14, tail=TAIL)


def make_attention(
    checked_rows: int,
    *,
    error_limit: float = math.inf,
    n_layers: int = N_LAYERS,
    policy: _core.SparsePolicy | None = None,
    threads: int | None = None,
    precision: str = "f32",
) -> _core.ChunkedAttention:
    return _core.ChunkedAttention(
        policy or make_policy(),
        SHAPE.n_heads,
        SHAPE.n_kv_heads,
        SHAPE.head_dim,
        n_layers=n_layers,
        chunk_size=CHUNK,
        batch_size=N_TOKENS,
        max_context=2 * N_TOKENS,
        cache_type="f32",
        checked_rows=checked_rows,
        error_limit=error_limit,
        threads=threads,
        precision=precision,
    )


def run(
    attention: _core.ChunkedAttention,
    layer: int,
    *,
    ends: tuple[int, ...] = (N_TOKENS,),
    window: int = 0,
) -> np.ndarray:
    """Output [n_heads, n, d] of the prompt of a layer, one call per end."""
    qkv = [token_major(array) for array in layer_qkv(layer)]
    outputs, start = [], 0
    for end in ends:
        q, k, v = (array[start:end] for array in qkv)
        outputs.append(attention.run(layer, q, k, v, window=window, is_last=end == ends[-1]))
        start = end
    return head_major(np.concatenate(outputs))


def layer_qkv(layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = random_qkv(layer, n_tokens=N_TOKENS, **SHAPE.heads)
    return 3 * q, k, v


def expected_sums(sparse: np.ndarray, layer: int, rows: np.ndarray) -> list[float]:
    dense = causal_attention(*layer_qkv(layer))[:, rows]
    return [float(np.sum((sparse[:, rows] - dense) ** 2)), float(np.sum(dense**2))]


def sampled_rows(n_rows: int, begin: int, end: int, layer: int) -> np.ndarray:
    """At even distances; those of every layer begin at another multiple of the golden ratio."""
    offset = layer * (math.sqrt(5) - 1) / 2 % 1
    return begin + (np.arange(n_rows) + offset) * (end - begin) // n_rows


@pytest.mark.parametrize("n_rows", [1, 7, 1000])
def test_sums_are_those_of_the_sampled_rows(n_rows: int) -> None:
    attention, plain = make_attention(n_rows), make_attention(0)
    begin, end = CHUNK, N_TOKENS - TAIL
    for layer in range(N_LAYERS):
        output = run(attention, layer)
        np.testing.assert_array_equal(output, run(plain, layer))
        rows = sampled_rows(min(n_rows, end - begin), begin, end, layer).astype(int)
        expected = expected_sums(output, layer, rows)
        np.testing.assert_allclose(attention.error_sums[layer], expected, rtol=1e-4)
        assert expected[0] > 1e-3 * expected[1]
    assert attention.n_dense_reads == 0
    assert not plain.error_sums.any()
    assert attention_error(plain.error_sums) is None
    ratios = attention.error_sums[:, 0] / attention.error_sums[:, 1]
    assert attention_error(attention.error_sums) == pytest.approx(math.sqrt(ratios.mean()))


def test_calls_add_up_and_a_reset_forgets() -> None:
    attention = make_attention(1000)
    output = run(attention, 0, ends=(64, 128, N_TOKENS))
    rows = np.arange(CHUNK, N_TOKENS - TAIL)
    np.testing.assert_allclose(attention.error_sums[0], expected_sums(output, 0, rows), rtol=1e-4)
    attention.reset()
    assert not attention.error_sums.any()


def test_short_calls_are_sampled_in_proportion() -> None:
    attention = make_attention(8)
    output = run(attention, 1, ends=(100, N_TOKENS))
    dense = causal_attention(*layer_qkv(1))
    rows = [*sampled_rows(4, CHUNK, 100, 1), *sampled_rows(5, 100, N_TOKENS - TAIL, 1)]
    difference = (output - dense)[:, np.array(rows, int)]
    assert attention.error_sums[1, 0] == pytest.approx(np.sum(difference**2), rel=1e-4)


def test_the_sample_does_not_depend_on_threads() -> None:
    sums = []
    for threads in (1, 3):
        attention = make_attention(5, threads=threads)
        run(attention, 1)
        sums.append(attention.error_sums)
    np.testing.assert_array_equal(*sums)


def needs_int8() -> None:
    if "int8" not in _core.attention_precisions():
        pytest.skip("this instruction set has no products in 8 bits")


@pytest.mark.parametrize("by_query_head", [False, True])
@pytest.mark.parametrize("n_rows", [16, 1000])
def test_what_is_rounded_is_not_taken_for_missing(n_rows: int, by_query_head: bool) -> None:
    """Nothing is missing where budgets hold everything, though outputs differ from exact ones."""
    needs_int8()
    n_sets = N_LAYERS * (SHAPE.n_heads if by_query_head else SHAPE.n_kv_heads)
    limit, errors = math.inf, []
    for _ in range(2):
        policy = _core.headwise_policy([N_TOKENS] * n_sets, by_query_head=by_query_head)
        attention = make_attention(n_rows, policy=policy, precision="int8", error_limit=limit)
        attention.begin_call()
        for layer in range(2):  # the last one has another limit
            run(attention, layer)
        assert attention.n_dense_reads == 0
        errors.append(attention.error_sums[:2, 0] / attention.error_sums[:2, 1])
        limit = 0.5 * errors[0].min()
    assert (errors[0] > 1e-4).all()
    assert (abs(errors[1]) < 0.1 * errors[0]).all()


def test_what_is_missing_shows_beneath_what_is_rounded() -> None:
    """Where a layer is above its limit; below it both count, which takes less time."""
    needs_int8()

    def measure(precision: str, layer: int, limit: float) -> tuple[float, int]:
        attention = make_attention(
            1000, policy=_core.h2o_policy(140, 60), precision=precision, error_limit=limit
        )
        attention.begin_call()
        run(attention, layer)
        difference, dense = attention.error_sums[layer]
        return difference / dense, attention.n_dense_reads

    for layer in range(2):  # the last one has another limit
        exact, both = (measure(name, layer, math.inf)[0] for name in ("f32", "int8"))
        assert exact < 0.95 * both
        found, n_dense = measure("int8", layer, (exact + both) / 2)
        assert found == pytest.approx(exact, rel=0.02)
        assert n_dense == 0
        assert measure("int8", layer, 0.7 * exact)[1] > 0


def test_nothing_is_measured_where_everything_is_read() -> None:
    full = _core.headwise_policy([None] * SHAPE.n_kv_heads * N_LAYERS)
    for policy, window in ((_core.dense_policy(), 0), (full, 0), (make_policy(), 40)):
        attention = make_attention(4, policy=policy, error_limit=0.0)
        attention.begin_call()
        run(attention, 0, window=window)
        assert not attention.error_sums.any()
        assert attention.n_dense_reads == 0


def set_errors(sparse: np.ndarray, layer: int, n_sets: int) -> np.ndarray:
    """[n_sets] squares of what an output is wrong by, relative to the layer's dense output."""
    dense = causal_attention(*layer_qkv(layer))
    rows = slice(CHUNK, N_TOKENS - TAIL)
    squares = ((sparse - dense)[:, rows] ** 2).sum(axis=(1, 2)).reshape(n_sets, -1).sum(axis=1)
    return np.asarray(squares / np.sum(dense[:, rows] ** 2))


def sets_read_again(errors: np.ndarray, limit: float) -> list[int]:
    """The fewest sets without which the layer is within its limit: those that err most."""
    order = np.argsort(-errors)
    left = [errors[order[n:]].sum() <= limit for n in range(len(errors) + 1)]
    return sorted(order[: left.index(True)].tolist())


@pytest.mark.parametrize("factor", [1.01, 0.99, 0.6, 0.3, 0.05])
def test_sets_that_would_exceed_a_layers_limit_are_read_again_densely(factor: float) -> None:
    """The last of three layers may err 16 times as much (as a norm 4 times)."""
    plain = make_attention(0)
    outputs = [run(plain, layer) for layer in range(N_LAYERS)]
    errors = [set_errors(output, layer, SHAPE.n_kv_heads) for layer, output in enumerate(outputs)]
    limit = factor * max(error.sum() for error in errors[: N_LAYERS - 1])
    limits = [limit] * (N_LAYERS - 1) + [16 * limit]
    expected = [sets_read_again(*pair) for pair in zip(errors, limits, strict=True)]
    n_again = sum(map(len, expected))
    assert {1.01: n_again == 0, 0.99: n_again == 1, 0.05: n_again >= 4}.get(factor, n_again > 1)
    for layer in range(N_LAYERS):  # each in a call of its own
        attention = make_attention(1000, error_limit=limit)
        attention.begin_call()
        found = run(attention, layer).reshape(SHAPE.n_kv_heads, -1)
        dense = causal_attention(*layer_qkv(layer)).reshape(SHAPE.n_kv_heads, -1)
        sparse = outputs[layer].reshape(SHAPE.n_kv_heads, -1)
        for n in range(SHAPE.n_kv_heads):
            if n in expected[layer]:
                np.testing.assert_allclose(found[n], dense[n], rtol=0, atol=2e-5)
            else:
                np.testing.assert_array_equal(found[n], sparse[n])
        assert attention.n_dense_reads == len(expected[layer])
        ratio = attention.error_sums[layer, 0] / attention.error_sums[layer, 1]
        kept = np.delete(errors[layer], expected[layer])
        assert ratio == pytest.approx(kept.sum(), rel=1e-4, abs=1e-9)


HALF = 120


def read_half(attention: _core.ChunkedAttention, start: int, end: int) -> np.ndarray:
    """Output [n_heads, end - start, d] of a call of one layer."""
    attention.begin_call()
    qkv = (token_major(array)[start:end] for array in layer_qkv(0))
    output = attention.run(0, *qkv, is_last=end == N_TOKENS)
    attention.end_call()
    return head_major(output)


@pytest.mark.parametrize("by_query_head", [False, True])
def test_a_set_that_was_read_again_reads_the_rest_of_the_prompt(by_query_head: bool) -> None:
    n_sets = SHAPE.n_heads if by_query_head else SHAPE.n_kv_heads

    def make(limit: float, threads: int | None = None) -> _core.ChunkedAttention:
        policy = _core.headwise_policy(
            [24] * n_sets, by_query_head=by_query_head, local=8, sinks=2, tail=TAIL
        )
        return make_attention(1000, n_layers=1, policy=policy, error_limit=limit, threads=threads)

    plain = make(math.inf)
    sparse = [read_half(plain, 0, HALF), read_half(plain, HALF, N_TOKENS)]
    dense = causal_attention(*layer_qkv(0))
    squares = (sparse[0] - dense[:, :HALF])[:, CHUNK:] ** 2
    errors = squares.sum(axis=(1, 2)).reshape(n_sets, -1).sum(axis=1)
    errors /= np.sum(dense[:, CHUNK:HALF] ** 2)
    worst = int(errors.argmax())
    limit = 0.99 * float(errors.sum())

    def is_dense(found: np.ndarray, start: int, end: int) -> np.ndarray:
        wrong = np.abs(found - dense[:, start:end]).max(axis=(1, 2))
        return np.asarray(wrong.reshape(n_sets, -1).max(axis=1) < 2e-5)

    attention = make(limit)
    found = read_half(attention, 0, HALF)
    np.testing.assert_array_equal(np.flatnonzero(is_dense(found, 0, HALF)), [worst])
    others = np.arange(n_sets) != worst
    by_set = (n_sets, -1)
    np.testing.assert_array_equal(found.reshape(by_set)[others], sparse[0].reshape(by_set)[others])
    assert attention.n_dense_reads == 1
    state = attention.save_state()
    chosen = attention.policy.memory_set(0, worst)
    found = read_half(attention, HALF, N_TOKENS)
    reads_all = is_dense(found, HALF, N_TOKENS)
    assert reads_all[worst]
    assert not reads_all.all()
    assert attention.n_dense_reads == 1 + reads_all.sum()
    np.testing.assert_array_equal(
        found.reshape(by_set)[~reads_all], sparse[1].reshape(by_set)[~reads_all]
    )
    np.testing.assert_array_equal(attention.policy.memory_set(0, worst), chosen)  # it is not asked

    for other in (make(limit, threads=3), attention):
        other.reset()
        assert other.n_dense_reads == 0
        read_half(other, 0, HALF)
        assert other.save_state() == state
        np.testing.assert_array_equal(read_half(other, HALF, N_TOKENS), found)


def test_once_half_of_all_was_read_twice_the_others_are_read_densely_at_once() -> None:
    attention = make_attention(3, error_limit=0.0)
    attention.begin_call()
    pairs = []
    for layer in range(N_LAYERS):
        before = attention.pairs_computed * N_LAYERS
        output = run(attention, layer)
        pairs.append(attention.pairs_computed * N_LAYERS - before)
        expected = causal_attention(*layer_qkv(layer))
        np.testing.assert_allclose(output, expected, rtol=0, atol=2e-5)
    assert attention.n_dense_reads == SHAPE.n_kv_heads * N_LAYERS
    assert attention_error(attention.error_sums) == 0.0
    dense = N_TOKENS * (N_TOKENS + 1) // 2
    rounding = N_LAYERS  # they are counted as the mean of the layers
    assert min(pairs[:2]) > 1.1 * dense
    assert pairs[2:] == pytest.approx([dense], abs=rounding)


def test_what_is_read_twice_counts_for_its_call() -> None:
    """The next call, too, tries layers that the first read densely for what went before."""
    attention = make_attention(3, error_limit=0.0)
    q, k, v = (token_major(array) for array in layer_qkv(0))
    tried = []
    for start, end in ((0, 64), (64, N_TOKENS)):
        attention.begin_call()
        for layer in range(N_LAYERS):
            attention.run(layer, q[start:end], k[start:end], v[start:end], is_last=False)
        attention.end_call()
        tried.append(attention.error_sums[:, 1].copy())
    assert attention.n_dense_reads == 2 * SHAPE.n_kv_heads * N_LAYERS
    np.testing.assert_array_equal(tried[0] > 0, [True, True, False])
    np.testing.assert_array_equal(tried[0][:2], tried[1][:2])  # whose sets read everything by then
    assert tried[1][2] > 0


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_limit_is_at_least_zero(limit: float) -> None:
    with pytest.raises(ValueError, match="limit of the attention's error"):
        make_attention(3, error_limit=limit)

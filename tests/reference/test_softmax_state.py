"""Self-checks of the merge of attention parts."""

from __future__ import annotations

import numpy as np

from tests.reference.softmax_state import SoftmaxState, attend, merge

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def three_parts(scale: float) -> tuple[list[SoftmaxState], SoftmaxState]:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((5, 4)), rng.standard_normal((30, 4))
    v = rng.standard_normal((30, 3))
    whole, _ = attend(q, k, v, scale=scale)
    bounds = [(0, 7), (7, 8), (8, 30)]
    return [attend(q, k[a:b], v[a:b], scale=scale)[0] for a, b in bounds], whole


def assert_same(a: SoftmaxState, b: SoftmaxState) -> None:
    np.testing.assert_allclose(a.log_sum_exp, b.log_sum_exp, **TIGHT)
    np.testing.assert_allclose(a.o, b.o, **TIGHT)


def test_merge_equals_one_softmax_for_large_logits() -> None:
    for scale in (0.5, 10.0, 30.0):
        (a, b, c), whole = three_parts(scale)
        merged = merge(merge(a, b), c)
        assert_same(merged, whole)
        np.testing.assert_array_equal(merged.m, whole.m)


def test_merge_does_not_depend_on_the_order() -> None:
    (a, b, c), _ = three_parts(10.0)
    assert_same(merge(merge(a, b), c), merge(merge(c, a), b))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))


def test_merge_with_an_empty_part_changes_nothing() -> None:
    (a, _, _), _ = three_parts(1.0)
    empty, weights = attend(np.zeros((5, 4)), np.zeros((0, 4)), np.zeros((0, 3)), scale=1.0)
    assert weights.shape == (5, 0)
    assert np.all(empty.m == -np.inf) and np.all(empty.l == 0.0) and np.all(empty.o == 0.0)
    for merged in (merge(a, empty), merge(empty, a)):
        np.testing.assert_array_equal(merged.m, a.m)
        np.testing.assert_array_equal(merged.l, a.l)
        np.testing.assert_allclose(merged.o, a.o, **TIGHT)
    assert np.all(merge(empty, empty).l == 0.0)


def test_rows_without_a_visible_key_are_empty() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((3, 2)) for _ in range(3))
    visible = np.tri(3, k=-1, dtype=bool)
    state, weights = attend(q, k, v, scale=1.0, visible=visible)
    assert state.m[0] == -np.inf and state.l[0] == 0.0 and np.all(state.o[0] == 0.0)
    np.testing.assert_allclose(weights.sum(axis=1), [0.0, 1.0, 1.0], **TIGHT)

"""Eviction against NumPy: what keys received, which rows go, where the others end up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.past_context import RuleConfig
from edgeh2o import LLM, DenseConfig, HeadwiseConfig, PrefillConfig, UsageError
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.runners.runner_calls import free_positions
from tests.model.model_pair import random_tokens
from tests.tiny_models import TinyModelFactory

CONTEXT, N_OBSERVED, N_SINKS = 96, 16, 4
N_HEADS, N_KV_HEADS, HEAD_DIM, N_LAYERS = 4, 2, 16, 2
Array = NDArray[np.float64]


class Recording:
    """Reads everything, and drops what ``choose`` says of the scores that it writes down."""

    def __init__(self, choose: Callable[[Array, int], Any] | None = None) -> None:
        self.scores: dict[tuple[int, int], Array] = {}
        self.choose = choose or drop_lowest

    def select_memory(
        self, layer: int, kv_head: int, chunk: tuple[int, int], *_: object
    ) -> NDArray[np.int32]:
        return np.arange(chunk[0], dtype=np.int32)

    def evict(
        self, layer: int, kv_head: int, n_dropped: int, scores: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        self.scores[layer, kv_head] = scores.astype(np.float64)
        dropped: NDArray[np.int32] = self.choose(scores, n_dropped)
        return dropped


def _given(rule: object) -> RuleConfig:
    return RuleConfig(lambda: rule)


def drop_lowest(scores: NDArray[np.floating], n_dropped: int) -> NDArray[np.int64]:
    """The oracle of the default: of equal scores the later go."""
    n_kept = len(scores) - n_dropped
    window = min(256, n_kept // 2)
    first = min(N_SINKS, n_kept - window)
    inner = np.arange(first, len(scores) - window)
    order = np.lexsort((-inner, scores[inner]))
    return np.sort(inner[order[:n_dropped]])


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Any:
    path = tiny_model(
        n_layers=N_LAYERS, n_heads=N_HEADS, n_kv_heads=N_KV_HEADS, head_dim=HEAD_DIM, seed=5
    )
    prefill = PrefillConfig(batch_size=CONTEXT, chunk_size=CONTEXT)
    # Prompts and generated tokens are compared: in bf16, which some processors take, they differ.
    options: Any = {"cache_type": "f32", "attention_precision": "f32", "threads": 1}
    with LLM(path, attention=DenseConfig(), prefill=prefill, **options) as llm:
        yield llm


def _start(llm: LLM, attention: SparseAttentionConfig | None = None, **sizes: Any) -> Any:
    runner: Any = llm.start_runner(CONTEXT, attention=attention, **sizes)
    runner.allow_eviction(True)
    return runner


def _rows(runner: Any) -> list[NDArray[np.float32]]:
    """Of every layer and KV head: keys, then values, [position, head_dim]."""
    return [row.view(np.float32).reshape(-1, HEAD_DIM).copy() for row in runner.cached_rows()]


def _weights(q: Array, k: Array, n_queries: int) -> Array:
    """[n_queries, n] causal weights of the last queries [n, group, dim], summed over the group."""
    n = len(k)
    logits = np.einsum("qgd,kd->gqk", q[n - n_queries :], k) / np.sqrt(HEAD_DIM)
    hidden = np.arange(n) > np.arange(n - n_queries, n)[:, None]
    logits = np.where(hidden, -np.inf, logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).sum(0)


@pytest.mark.parametrize("n", [3, 40, CONTEXT])
def test_scores_are_what_keys_received_of_the_last_queries(model: LLM, n: int) -> None:
    seen: dict[int, tuple[Array, Array]] = {}

    def look(layer: int, _: object, q: Any, k: Any, *__: object) -> None:
        queries = q.astype(np.float64).reshape(n, N_KV_HEADS, -1, HEAD_DIM)
        seen[layer] = queries, k.astype(np.float64).reshape(n, N_KV_HEADS, HEAD_DIM)

    rule = Recording()
    runner = _start(model, _given(rule), all_rows=True)
    runner.prefill(random_tokens(n), is_last=True, on_attention=look)
    runner.evict(1)
    n_queries = min(n, N_OBSERVED)
    for (layer, head), scores in rule.scores.items():
        queries, keys = (part[:, head] for part in seen[layer])
        expected = _weights(queries, keys, n_queries).sum(0) / n_queries
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)
    assert len(rule.scores) == N_LAYERS * N_KV_HEADS


def test_generated_tokens_count_as_those_of_a_prompt(model: LLM) -> None:
    """Tokens that are decoded add what the same tokens would as the last ones of a prompt."""
    tokens, n_first = random_tokens(80), 80 - N_OBSERVED
    rules = [Recording() for _ in range(3)]
    whole, first, decoded = (_start(model, _given(rule), all_rows=True) for rule in rules)
    whole.prefill(tokens, is_last=True)
    for runner in (first, decoded):
        runner.prefill(tokens[:n_first], is_last=True)
    for token in tokens[n_first:]:
        decoded.decode(int(token))
    for runner in (whole, first, decoded):
        runner.evict(1)
    for slot, scores in rules[2].scores.items():
        expected = (rules[0].scores[slot][:n_first] + rules[1].scores[slot]) / 2
        np.testing.assert_allclose(scores[:n_first], expected, rtol=1e-3, atol=1e-5)


def _rotate_back(k: Array, distances: NDArray[np.int64], inv_freq: Array) -> Array:
    angles = distances[:, None] * inv_freq
    n_pairs = len(inv_freq)
    a, b = k[:, :n_pairs], k[:, n_pairs : 2 * n_pairs]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos + b * sin, b * cos - a * sin, k[:, 2 * n_pairs :]], axis=1)


def test_the_rows_that_stay_move_up_and_are_rotated(model: LLM) -> None:
    """The default's rows are those of the oracle's choice, at their new positions."""
    rule = Recording()
    runners = [_start(model), _start(model, _given(rule))]
    n_dropped, inv_freq = 24, np.asarray(model.config.rope_inv_freq, np.float64)
    for runner in runners:
        runner.prefill(random_tokens(70), is_last=True)
        for token in random_tokens(26, seed=2):
            runner.decode(int(token))
    before = _rows(runners[1])
    for runner in runners:
        assert free_positions(runner) == 0
        runner.evict(n_dropped)
        assert (runner.position, runner.n_evicted, free_positions(runner)) == (96, 24, 24)
    own, theirs = (_rows(runner) for runner in runners)
    for slot, scores in enumerate(rule.scores[key] for key in sorted(rule.scores)):
        dropped = drop_lowest(scores, n_dropped)
        kept = np.setdiff1d(np.arange(CONTEXT), dropped)
        assert kept[:N_SINKS].tolist() == [0, 1, 2, 3]
        assert kept[-36:].tolist() == list(range(60, 96))
        keys = _rotate_back(
            before[2 * slot][kept].astype(np.float64), kept - np.arange(len(kept)), inv_freq
        )
        for rows in (own, theirs):
            np.testing.assert_allclose(rows[2 * slot], keys, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(rows[2 * slot + 1], before[2 * slot + 1][kept])


def test_latent_rows_are_rotated_where_they_have_a_position(tiny_model: TinyModelFactory) -> None:
    """Their first part, of which keys and values are made, stays as it is."""
    rule = Recording()
    with LLM(tiny_model(architecture="minicpm3"), cache_type="f32", threads=1) as llm:
        latent, inv_freq = llm.config.latent, np.asarray(llm.config.rope_inv_freq, np.float64)
        assert latent is not None
        runner = _start(llm, _given(rule))
        runner.prefill(random_tokens(CONTEXT), is_last=True)
        before = [row.view(np.float32).reshape(CONTEXT, -1).copy() for row in runner.cached_rows()]
        runner.evict(40)
        after = [row.view(np.float32).reshape(CONTEXT - 40, -1) for row in runner.cached_rows()]
    for rows, old, key in zip(after, before, sorted(rule.scores), strict=True):
        kept = np.setdiff1d(np.arange(CONTEXT), drop_lowest(rule.scores[key], 40))
        np.testing.assert_array_equal(rows[:, : latent.rank], old[kept, : latent.rank])
        rotated = old[kept, latent.rank :].astype(np.float64)
        rotated = _rotate_back(rotated, kept - np.arange(len(kept)), inv_freq)
        np.testing.assert_allclose(rows[:, latent.rank :], rotated, rtol=1e-5, atol=1e-5)


def test_what_follows_reads_the_rows_that_are_left(model: LLM) -> None:
    """As a cache does into which the same rows were written."""
    runner = _start(model)
    runner.prefill(random_tokens(CONTEXT), is_last=True)
    runner.evict(30)
    twin = model.start_runner(CONTEXT)
    twin.prefill(random_tokens(CONTEXT - 30, seed=9), is_last=True)
    for rows, source in zip(twin.cached_rows(), runner.cached_rows(), strict=True):
        rows[:] = source
    for token in random_tokens(30, seed=3):
        np.testing.assert_array_equal(runner.decode(int(token)), twin.decode(int(token)))
    assert free_positions(runner) == 0


@pytest.mark.parametrize("n_heads", [N_HEADS, N_KV_HEADS])
def test_memory_sets_begin_anew(model: LLM, n_heads: int) -> None:
    """With room for all that is left, those of query heads too, the next chunk reads all of it."""
    budgets = (CONTEXT,) * n_heads * N_LAYERS
    sparse = HeadwiseConfig(
        budgets=budgets, by_query_head=n_heads == N_HEADS, local=8, landmark_size=0, tail=0
    )
    sizes = PrefillConfig(batch_size=32, chunk_size=16)
    runners = [_start(model, attention, prefill=sizes) for attention in (sparse, DenseConfig())]
    outputs = []
    for runner in runners:
        for seed in range(3):
            runner.prefill(random_tokens(32, seed=seed), is_last=True)
        runner.evict(40)
        runner.prefill(random_tokens(32, seed=3), is_last=False)
        outputs.append(runner.prefill(random_tokens(8, seed=4), is_last=True))
    heads = range(n_heads)
    for layer, head in product(range(N_LAYERS), heads):
        memory = runners[0].policy.memory_set(layer, head)
        np.testing.assert_array_equal(memory, np.arange(88))
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-4)


def test_old_attention_counts_less(model: LLM) -> None:
    """A second eviction sees scores that an eviction in between has weakened by a tenth."""
    rules = [Recording(), Recording()]
    runners = [_start(model, _given(rule)) for rule in rules]
    for runner in runners:
        runner.prefill(random_tokens(90), is_last=True)
    runners[0].evict(8)
    kept = {
        slot: np.delete(scores, drop_lowest(scores, 8)) for slot, scores in rules[0].scores.items()
    }
    runners[0].evict(1)
    for slot, scores in rules[0].scores.items():
        np.testing.assert_allclose(scores, kept[slot], rtol=1e-5)


def test_a_layer_with_a_window_drops_its_oldest(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(
        architecture="gemma3", n_layers=2, sliding_window=32, sliding_window_pattern=2
    )
    rule = Recording()
    with LLM(path, attention=DenseConfig(), cache_type="f32", threads=1) as llm:
        windows = [layer.window for layer in llm.config.layers]
        runner = _start(llm, _given(rule))
        runner.prefill(random_tokens(CONTEXT), is_last=True)
        before = [row.copy() for row in runner.cached_rows()]
        runner.evict(20)
        asked = {layer for layer, _ in rule.scores}
        assert asked == {i for i, window in enumerate(windows) if window == 0}
        n_heads = len(before) // 2 // len(windows)
        for i, window in enumerate(windows):
            for head in range(n_heads if window else 0):
                index = 2 * (i * n_heads + head) + 1
                rows = runner.cached_rows()[index]
                np.testing.assert_array_equal(rows, before[index][-len(rows) :])


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda scores, n: np.arange(n - 1), "4 positions were given, 5 are to be dropped"),
        (lambda scores, n: np.arange(n) + len(scores), "is not before the chunk"),
        (lambda scores, n: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_bad_answer_of_a_rule_changes_nothing(
    model: LLM, choose: Callable[..., Any], message: str
) -> None:
    runner = _start(model, _given(Recording(choose)))
    runner.prefill(random_tokens(50), is_last=True)
    before = _rows(runner)
    with pytest.raises(UsageError, match=message):
        runner.evict(5)
    assert (runner.position, runner.n_evicted) == (50, 0)
    for rows, expected in zip(_rows(runner), before, strict=True):
        np.testing.assert_array_equal(rows, expected)


def test_going_back(model: LLM) -> None:
    runner = _start(model)
    runner.prefill(random_tokens(90), is_last=True, stays_open=True)
    assert runner.mark()
    runner.evict(40)
    assert runner.find_mark(100) == runner.prefill_end == runner.position == 90
    assert (runner.find_mark(89), runner.mark(), runner.prompt_logits) == (0, False, None)
    first = runner.decode(7).copy()
    runner.rewind(90)
    np.testing.assert_array_equal(runner.decode(7), first)
    with pytest.raises(ValueError, match="position 30: what lies there was evicted"):
        runner.rewind(30)
    with pytest.raises(ValueError, match=r"40 of its tokens were evicted .*--context-full evict"):
        runner.save_state()
    assert len(runner.token_ids) == runner.position == 91
    runner.reset()
    assert (runner.position, runner.n_evicted, runner.token_ids) == (0, 0, [])
    for n in (0, 91):
        with pytest.raises(ValueError, match=f"cannot evict {n} of"):
            runner.evict(n)


def test_what_cannot_evict_is_refused(model: LLM, tiny_model: TinyModelFactory) -> None:
    with pytest.raises(ValueError, match="cannot evict"):
        model.start_runner(CONTEXT).evict(1)  # type: ignore[attr-defined]
    with (
        LLM(tiny_model(head_dim=32), cache_type="q8_0") as llm,
        pytest.raises(ValueError, match=r"q8_0 would be rounded anew.*--cache-type f16"),
    ):
        _start(llm)
    with (
        LLM(tiny_model(architecture="hunyuan-dense")) as llm,
        pytest.raises(ValueError, match="normalises its keys after their rotation"),
    ):
        _start(llm)

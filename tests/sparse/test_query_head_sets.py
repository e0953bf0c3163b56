"""Memory sets of query heads are those of a model in which every query head has a KV head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeh2o import _core
from tests.reference.qkv import random_qkv

N, S, HEAD_DIM = 460, 64, 64
BUDGETS = (96, None, 128, 64, None, 200)

pytestmark = pytest.mark.usefixtures("isa")


def run(
    qkv: tuple[np.ndarray, ...],
    *,
    by_query_head: bool,
    max_past: int,
    tail: int,
    cache_type: str,
    threads: int = 1,
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray | None]]:
    """Outputs [n, n_heads, head_dim], memory sets and scores by head."""
    policy = _core.headwise_policy(
        list(BUDGETS),
        by_query_head=by_query_head,
        local=32,
        sinks=4,
        page_size=16,
        max_past=max_past,
        tail=tail,
    )
    sizes: dict[str, Any] = {"chunk_size": S, "batch_size": 2 * S, "max_context": N}
    attention = _core.ChunkedAttention(
        policy,
        len(BUDGETS),
        qkv[1].shape[1],
        HEAD_DIM,
        cache_type=cache_type,
        threads=threads,
        **sizes,
    )
    outputs = [
        attention.run(0, *(part[i : i + 2 * S] for part in qkv), is_last=i + 2 * S >= N)
        for i in range(0, N, 2 * S)
    ]
    heads = range(len(BUDGETS))
    assert policy.splits_groups == by_query_head
    scores = [
        None if budget is None else policy.scores(0, head, N)
        for head, budget in zip(heads, BUDGETS, strict=True)
    ]
    return np.concatenate(outputs), [policy.memory_set(0, head) for head in heads], scores


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(("max_past", "tail"), [(8192, 0), (8192, 16), (128, 0), (128, 16)])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 3])
def test_equal_to_repeated_kv_heads(
    n_kv_heads: int, max_past: int, tail: int, cache_type: str
) -> None:
    n_heads = len(BUDGETS)
    parts = random_qkv(0, n_tokens=N, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=HEAD_DIM)
    q, k, v = (np.ascontiguousarray(part.swapaxes(0, 1), np.float32) for part in parts)
    settings: dict[str, Any] = {"max_past": max_past, "tail": tail, "cache_type": cache_type}
    out, memory, scores = run((q, k, v), by_query_head=True, **settings)
    repeated = [np.repeat(rows, n_heads // n_kv_heads, axis=1) for rows in (k, v)]
    expected, sets, sums = run((q, *repeated), by_query_head=False, **settings)
    np.testing.assert_array_equal(out, expected)
    for found, wanted in zip(memory, sets, strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(scores, sums, strict=True):
        if wanted is not None:
            np.testing.assert_array_equal(found, wanted)
    assert len({tuple(positions) for positions in memory}) > 2
    threaded, _, _ = run((q, k, v), by_query_head=True, threads=3, **settings)
    np.testing.assert_array_equal(threaded, out)


def test_generated_tokens_go_by_kv_heads() -> None:
    with pytest.raises(ValueError, match="by_query_head with decode_from needs decode_budgets"):
        _core.headwise_policy([4], by_query_head=True, decode_from=100)
    policy = _core.headwise_policy(
        list(BUDGETS), by_query_head=True, decode_from=0, decode_budgets=[4]
    )
    with pytest.raises(ValueError, match="1 decode_budgets do not fit 1 layers with 2 KV heads"):
        _core.ChunkedAttention(
            policy, len(BUDGETS), 2, HEAD_DIM, chunk_size=S, batch_size=S, max_context=N
        )


def test_query_heads_share_the_sums_of_their_pages() -> None:
    def page_bytes(n_slots: int, **options: Any) -> int:
        sizes: dict[str, Any] = {"n_layers": 8, "chunk_size": S, "batch_size": S}
        of_pages, without = (
            _core.ChunkedAttention.estimate_bytes(
                _core.headwise_policy([64] * 8 * n_slots, page_size=page_size, **options),
                *(6, 2, HEAD_DIM),
                max_context=4096,
                **sizes,
            )["scores"]
            for page_size in (16, 0)
        )
        return of_pages - without

    of_kv_heads = page_bytes(2)
    assert page_bytes(6, by_query_head=True) < 1.3 * of_kv_heads
    decode = {"decode_from": 0, "decode_budgets": [32] * 16}
    assert page_bytes(6, by_query_head=True, **decode) < 1.5 * of_kv_heads


def test_a_generated_token_changes_nothing_for_later_prompts() -> None:
    """It has pages summed up that chunks have not seen, which they then find there."""
    parts = random_qkv(1, n_tokens=N, n_heads=len(BUDGETS), n_kv_heads=2, head_dim=HEAD_DIM)
    qkv = [np.ascontiguousarray(part.swapaxes(0, 1), np.float32) for part in parts]
    n_first, outputs = 3 * S + 60, []
    for n_generated in (0, 1):
        policy = _core.headwise_policy(
            list(BUDGETS),
            by_query_head=True,
            local=32,
            page_size=16,
            spread=1.0,
            decode_from=0,
            decode_budgets=[64, 32],
        )
        attention = _core.ChunkedAttention(
            policy, len(BUDGETS), 2, HEAD_DIM, chunk_size=S, batch_size=N, max_context=N
        )
        attention.run(0, *(part[:n_first] for part in qkv), is_last=True)
        for _ in range(n_generated):
            attention.decode(0, *(part[n_first : n_first + 1] for part in qkv))
            attention.rewind(n_first)
        outputs.append(attention.run(0, *(part[n_first:] for part in qkv), is_last=True))
    np.testing.assert_array_equal(*outputs)

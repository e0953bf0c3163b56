"""Attention on the host device against float64: splits, sparse chunks, landmarks, pages."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.packing import ORDERS, check_quantised, empty_quantised
from tools.cuda_driver import (
    COMBINE_SHARED_BYTES,
    Attend,
    Cache,
    Columns,
    Combine,
    Device,
    Heads,
    Join,
    KeyList,
    Quantised,
    Signs,
    attend_shared_bytes,
)

SPLIT_KEYS = 128
N_HEADS, N_KV, KEY_DIM, VALUE_DIM, CONTEXT = 6, 2, 24, 40, 320
HEADS = Heads(
    n_heads=N_HEADS, n_kv_heads=N_KV, key_dim=KEY_DIM, value_dim=VALUE_DIM, value_stride=VALUE_DIM
)
STRIDE = (N_HEADS + N_KV) * KEY_DIM + N_KV * VALUE_DIM


@pytest.mark.parametrize("cache_type", [0, 1])
@pytest.mark.parametrize(
    ("first", "window", "soft_cap", "sink"),
    [
        *[(0, 0, 0.0, None), (126, 0, 0.0, None), (290, 0, 2.0, None), (290, 140, 0.0, None)],
        *[(100, 1, 0.0, 0.0), (126, 0, 0.0, 2.0), (290, 140, 0.0, 90.0)],
    ],
)
def test_attention(
    device: Device, cache_type: int, first: int, window: int, soft_cap: float, sink: float | None
) -> None:
    random = np.random.default_rng(first)
    sinks = None if sink is None else (sink + random.normal(size=N_HEADS)).astype(np.float32)
    dtype, n_rows, scale = (np.float16, np.float32)[cache_type], 3, 0.3
    qkv = random.normal(size=(n_rows, STRIDE)).astype(np.float32)
    # What was not written yet must not be read.
    keys = np.full((N_KV, CONTEXT, KEY_DIM), np.nan, dtype)
    values = np.full((N_KV, CONTEXT, VALUE_DIM), np.nan, dtype)
    n_known = first + n_rows
    keys[:, :n_known] = random.normal(size=(N_KV, n_known, KEY_DIM))
    values[:, :n_known] = random.normal(size=(N_KV, n_known, VALUE_DIM))
    expected = np.zeros((n_rows, N_HEADS, VALUE_DIM))
    for row in range(n_rows):
        end = first + row + 1
        begin = max(0, end - window) if window else 0
        for head in range(N_HEADS):
            q = qkv[row, head * KEY_DIM : (head + 1) * KEY_DIM].astype(np.float64)
            logits = keys[head // 3, begin:end].astype(np.float64) @ q * scale
            if soft_cap:
                logits = soft_cap * np.tanh(logits / soft_cap)
            all_logits = logits if sinks is None else np.append(logits, sinks[head])
            weights = np.exp(all_logits - all_logits.max())
            weights /= weights.sum()
            expected[row, head] = weights[: len(logits)] @ values[head // 3, begin:end]
    types = {"k_type": cache_type, "v_type": cache_type}
    cache = Cache(k=device.put(keys), v=device.put(values), max_context=CONTEXT, **types)
    n_splits = -(-(window or first + n_rows) // SPLIT_KEYS)
    results = []
    for _ in range(ORDERS):
        n_parts = n_rows * N_HEADS * n_splits
        parts, states = device.empty(n_parts * VALUE_DIM * 4), device.empty(n_parts * 8)
        out = device.empty(expected.size * 4)
        arguments = Attend(
            qkv=device.put(qkv), cache=cache, heads=HEADS, parts=parts, states=states,
            keys=KeyList(window=window), stride=STRIDE, first=first, n_splits=n_splits,
            block_heads=3, scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
        shared = attend_shared_bytes(3, KEY_DIM)
        device.launch("attend_split", arguments, (n_splits, N_KV, n_rows), shared=shared)
        joined = Combine(
            parts=parts, states=states, out=out, n_heads=N_HEADS, value_dim=VALUE_DIM,
            n_splits=n_splits, sinks=None if sinks is None else device.put(sinks),
        )  # fmt: skip
        device.launch("combine_splits", joined, (N_HEADS, n_rows), shared=COMBINE_SHARED_BYTES)
        results.append(device.get(out, expected.shape, np.float32))
    np.testing.assert_allclose(results[0], expected, rtol=2e-5, atol=2e-6)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])

    # Some of the rows, and a part of their position that is known to the device alone.
    arguments.rows = device.put(np.array([2, 0], np.uint32))
    arguments.first, arguments.start = 0, device.put(np.array([first], np.uint32))
    device.launch("attend_split", arguments, (n_splits, N_KV, 2), shared=shared)
    device.launch("combine_splits", joined, (N_HEADS, 2), shared=COMBINE_SHARED_BYTES)
    named = device.get(out, (2, *expected.shape[1:]), np.float32)
    np.testing.assert_array_equal(named, results[0][[2, 0]])


@pytest.mark.parametrize("sink", [None, 1.0])
@pytest.mark.parametrize(
    ("n_splits", "value_dim"), [(1, 32), (130, 64), (300, 96), (3, 600), (7, 37)]
)
def test_splits_are_put_together(
    device: Device, n_splits: int, value_dim: int, sink: float | None
) -> None:
    """More of them than threads and wider heads too, of which some had no keys; also in 8 bits."""
    random = np.random.default_rng(n_splits)
    n_rows, n_heads = 2, 2
    parts = random.normal(size=(n_rows, n_heads, n_splits, value_dim)).astype(np.float32)
    states = np.stack(
        [random.normal(size=parts.shape[:3]) * 4, random.uniform(1, 9, size=parts.shape[:3])], -1
    ).astype(np.float32)
    is_empty = np.arange(n_splits) % 5 == 2
    states[:, :, is_empty] = -3.0e38, 0.0
    parts[:, :, is_empty] = np.nan  # were not written
    sinks = None if sink is None else np.full(n_heads, sink, np.float32)

    known = parts[:, :, ~is_empty].astype(np.float64)
    maxima, sums = np.moveaxis(states[:, :, ~is_empty].astype(np.float64), -1, 0)
    factors = np.exp2(maxima)
    total = (factors * sums).sum(-1) + (0.0 if sink is None else np.exp(sink))
    expected = (factors[..., None] * known).sum(2) / total[..., None]

    out = device.empty(expected.size * 4)
    is_rounded = value_dim % 32 == 0
    rounded = empty_quantised(device, n_rows, n_heads * value_dim) if is_rounded else Quantised()
    arguments = Combine(
        parts=device.put(parts), states=device.put(states), out=out, n_heads=n_heads,
        value_dim=value_dim, n_splits=n_splits, xq=rounded,
        sinks=None if sinks is None else device.put(sinks),
    )  # fmt: skip
    device.launch("combine_splits", arguments, (n_heads, n_rows), shared=COMBINE_SHARED_BYTES)
    got = device.get(out, expected.shape, np.float32)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    if is_rounded:
        check_quantised(device, rounded, got.reshape(n_rows, -1).astype(np.float64))
        arguments.out = None
        device.launch("combine_splits", arguments, (n_heads, n_rows), shared=COMBINE_SHARED_BYTES)
        check_quantised(device, rounded, got.reshape(n_rows, -1).astype(np.float64))


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize(("weight", "n_last"), [(0, 0), (1, 0), (2, 3)])
def test_sparse_attention_of_a_chunk(
    device: Device, soft_cap: float, weight: int, n_last: int
) -> None:
    """Own chunk and listed positions in one softmax; column sums of each part by its own."""
    random = np.random.default_rng(7)
    first, n_rows, scale = 200, 9, 0.3
    qkv = random.normal(size=(n_rows, STRIDE)).astype(np.float32)
    keys = random.normal(size=(N_KV, CONTEXT, KEY_DIM)).astype(np.float16)
    values = random.normal(size=(N_KV, CONTEXT, VALUE_DIM)).astype(np.float16)
    counts = np.array([140, 5], np.uint32)
    positions = np.full((N_KV, 150), -1, np.int32)
    for head, count in enumerate(counts):
        positions[head, :count] = np.sort(random.choice(first, count, replace=False))
    expected = np.zeros((n_rows, N_HEADS, VALUE_DIM))
    sums = [np.zeros((N_KV, n_rows)), np.zeros((N_KV, 150))]
    for row in range(n_rows):
        for head in range(N_HEADS):
            kv_head = head // 3
            q = qkv[row, head * KEY_DIM : (head + 1) * KEY_DIM].astype(np.float64)
            own = np.arange(first, first + row + 1)
            listed = positions[kv_head, : counts[kv_head]]
            parts = []
            for part, at in enumerate((own, listed)):
                logits = keys[kv_head, at].astype(np.float64) @ q * scale
                parts.append(soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits)
                share = np.exp(parts[-1]) / np.exp(parts[-1]).sum()
                counted = (1, len(at), float(row + n_last >= n_rows))[weight]
                sums[part][kv_head, : len(at)] += share * counted
            share = np.exp(np.concatenate(parts))
            rows = values[kv_head, np.concatenate((own, listed))].astype(np.float64)
            expected[row, head] = share / share.sum() @ rows
    shared = {"qkv": device.put(qkv), "heads": HEADS, "stride": STRIDE, "first": first}
    shared |= {"scale": scale, "soft_cap": soft_cap}
    shared["cache"] = Cache(k=device.put(keys), v=device.put(values), max_context=CONTEXT)
    own_keys = KeyList(lowest=first)
    memory = KeyList(positions=device.put(positions), counts=device.put(counts), stride=150)
    n_parts = n_rows * N_HEADS * 3
    parts_at, states = device.empty(n_parts * VALUE_DIM * 4), device.empty(n_parts * 8)
    # The three query heads of a KV head in two blocks.
    split = {"parts": parts_at, "states": states, "n_splits": 3, "block_heads": 2}
    n_bytes = attend_shared_bytes(2, KEY_DIM)
    for key_list, begin, n_ranges in ((own_keys, 0, 1), (memory, 1, 2)):
        arguments = Attend(**shared, **split, keys=key_list, first_split=begin)
        device.launch("attend_split", arguments, (n_ranges, 2 * N_KV, n_rows), shared=n_bytes)
    out = device.empty(expected.size * 4)
    joined = Combine(
        parts=parts_at, states=states, out=out, n_heads=N_HEADS, value_dim=VALUE_DIM, n_splits=3
    )
    device.launch("combine_splits", joined, (N_HEADS, n_rows), shared=COMBINE_SHARED_BYTES)
    got = device.get(out, expected.shape, np.float32)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    for part, (key_list, begin, n_ranges) in enumerate(((own_keys, 0, 1), (memory, 1, 2))):
        state = device.empty(n_rows * N_HEADS * 8)
        join = Join(
            states=states, out=state, n_rows=n_rows * N_HEADS, first_split=begin,
            n_joined=n_ranges, n_splits=3,
        )  # fmt: skip
        device.launch("join_states", join, (1,))
        width = sums[part].shape[1]
        at = device.put(np.zeros((N_KV, width), np.float32))
        columns = Columns(
            **shared, states=state, sums=at, keys=key_list, n_rows=n_rows, sums_stride=width,
            n_last=n_last, weight=weight,
        )  # fmt: skip
        device.launch("column_sums", columns, (-(-width // 4), N_KV))
        got = device.get(at, sums[part].shape, np.float32)
        np.testing.assert_allclose(got, sums[part], rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(0.0, False), (2.0, False), (0.0, True)])
def test_rows_that_stand_for_several(device: Device, soft_cap: float, has_sinks: bool) -> None:
    """Own chunk, listed positions and biased rows in one softmax; joint sums of the scored head."""
    random = np.random.default_rng(11)
    sinks = np.linspace(-1, 6, N_HEADS, dtype=np.float32)
    first, n_rows, scale, n_more = 200, 5, 0.3, 130
    qkv = random.normal(size=(n_rows, STRIDE)).astype(np.float32)
    keys = random.normal(size=(N_KV, CONTEXT, KEY_DIM)).astype(np.float16)
    values = random.normal(size=(N_KV, CONTEXT, VALUE_DIM)).astype(np.float16)
    more_k = random.normal(size=(N_KV, n_more, KEY_DIM)).astype(np.float32)
    more_v = random.normal(size=(N_KV, n_more, VALUE_DIM)).astype(np.float32)
    biases = random.uniform(0, 4, size=(N_KV, n_more)).astype(np.float32)
    positions = np.sort(random.choice(first, (N_KV, 7), replace=False), axis=1).astype(np.int32)
    counts, more_counts = np.array([7, 3], np.uint32), np.array([2, n_more], np.uint32)
    more_k[0, 2:] = more_v[0, 2:] = biases[0, 2:] = np.nan  # nobody reads them

    expected = np.zeros((n_rows, N_HEADS, VALUE_DIM))
    sums = np.zeros((N_KV, n_rows + 7))
    for row in range(n_rows):
        for head in range(N_HEADS):
            kv_head, n_own = head // 3, row + 1
            n_listed, n_synthetic = counts[kv_head], more_counts[kv_head]
            at = [*range(first, first + n_own), *positions[kv_head, :n_listed]]
            k = np.concatenate((keys[kv_head, at], more_k[kv_head, :n_synthetic]))
            v = np.concatenate((values[kv_head, at], more_v[kv_head, :n_synthetic]))
            q = qkv[row, head * KEY_DIM : (head + 1) * KEY_DIM].astype(np.float64)
            logits = k.astype(np.float64) @ q * scale
            if soft_cap:
                logits = soft_cap * np.tanh(logits / soft_cap)
            logits[len(at) :] += biases[kv_head, :n_synthetic]
            most = max(logits.max(), sinks[head]) if has_sinks else logits.max()
            share = np.exp(logits - most)
            share /= share.sum() + has_sinks * np.exp(sinks[head] - most)
            expected[row, head] = share @ v
            sums[kv_head, :n_own] += share[:n_own]
            sums[kv_head, n_rows : n_rows + n_listed] += share[n_own : len(at)]

    shared = {"qkv": device.put(qkv), "heads": HEADS, "stride": STRIDE, "first": first}
    shared |= {"scale": scale, "soft_cap": soft_cap}
    cache = Cache(k=device.put(keys), v=device.put(values), max_context=CONTEXT)
    more = Cache(k=device.put(more_k), v=device.put(more_v), max_context=n_more, k_type=1, v_type=1)
    listed = KeyList(positions=device.put(positions), counts=device.put(counts), stride=7)
    n_parts = n_rows * N_HEADS * 4
    parts, states = device.empty(n_parts * VALUE_DIM * 4), device.empty(n_parts * 8)
    split = {"parts": parts, "states": states, "n_splits": 4, "block_heads": 3}
    n_bytes = attend_shared_bytes(3, KEY_DIM)
    for begin, n_ranges, rows in (
        (0, 1, {"keys": KeyList(lowest=first), "cache": cache}),
        (1, 1, {"keys": listed, "cache": cache}),
        (2, 2, {"keys": KeyList(counts=device.put(more_counts)), "cache": more,
                "biases": device.put(biases)}),
    ):  # fmt: skip
        arguments = Attend(**shared, **split, **rows, first_split=begin)
        device.launch("attend_split", arguments, (n_ranges, N_KV, n_rows), shared=n_bytes)
    out, state = device.empty(expected.size * 4), device.empty(n_rows * N_HEADS * 8)
    at_sinks = device.put(sinks) if has_sinks else None
    joined = Combine(
        parts=parts, states=states, out=out, n_heads=N_HEADS, value_dim=VALUE_DIM, n_splits=4,
        sinks=at_sinks,
    )  # fmt: skip
    device.launch("combine_splits", joined, (N_HEADS, n_rows), shared=COMBINE_SHARED_BYTES)
    got = device.get(out, expected.shape, np.float32)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    join = Join(
        states=states, out=state, n_rows=n_rows * N_HEADS, n_joined=4, n_splits=4, sinks=at_sinks,
        n_heads=N_HEADS,
    )  # fmt: skip
    device.launch("join_states", join, (1,))
    is_scored = device.put(np.array([0, 1], np.uint32))
    for key_list, part in ((KeyList(lowest=first), sums[:, :n_rows]), (listed, sums[:, n_rows:])):
        width = part.shape[1]
        at = device.put(np.full((N_KV, width), -1, np.float32))
        columns = Columns(
            **shared, cache=cache, states=state, sums=at, is_scored=is_scored, keys=key_list,
            n_rows=n_rows, sums_stride=width,
        )  # fmt: skip
        device.launch("column_sums", columns, (-(-width // 4), N_KV))
        got = device.get(at, part.shape, np.float32)
        assert (got[0] == -1).all()
        n_listed = n_rows if key_list is not listed else 3
        np.testing.assert_allclose(got[1, :n_listed], part[1, :n_listed], rtol=3e-5, atol=1e-6)


def test_scores_of_pages(device: Device) -> None:
    """Squared softmax over bounds of keys, of queries split by sign (Quest)."""
    random = np.random.default_rng(12)
    n_rows, n_pages, scale = 5, 133, 0.2
    qkv = random.normal(size=(n_rows, STRIDE)).astype(np.float32)
    ends = np.sort(random.normal(size=(2, n_pages, KEY_DIM)), axis=0).astype(np.float32)
    bounds = np.concatenate((ends[1], ends[0]), axis=1)  # maxima, then minima
    q = qkv[:, 3 * KEY_DIM : 6 * KEY_DIM].reshape(n_rows, 3, KEY_DIM)  # heads of the second KV head
    halves = np.concatenate((np.maximum(q, 0), np.minimum(q, 0)), axis=2)
    logits = halves.astype(np.float64) @ bounds.T.astype(np.float64) * scale
    share = np.exp(logits - logits.max(-1, keepdims=True))
    expected = ((share / share.sum(-1, keepdims=True)) ** 2).sum((0, 1))

    at = device.put(qkv) + 3 * KEY_DIM * 4
    signs = device.empty(halves.nbytes)
    split = Signs(q=at, out=signs, n_heads=3, dim=KEY_DIM, stride=STRIDE)
    device.launch("split_signs", split, (3, n_rows))
    np.testing.assert_array_equal(device.get(signs, halves.shape, np.float32), halves)
    width = 2 * KEY_DIM
    rows = device.put(bounds)
    shared = {
        "qkv": signs, "heads": Heads(n_heads=3, n_kv_heads=1, key_dim=width), "stride": 3 * width,
        "cache": Cache(k=rows, v=rows, max_context=n_pages, k_type=1, v_type=1), "scale": scale,
        "keys": KeyList(counts=device.put(np.array([n_pages], np.uint32))),
    }  # fmt: skip
    states, state = device.empty(n_rows * 3 * 2 * 8), device.empty(n_rows * 3 * 8)
    device.launch(
        "attend_split",
        Attend(**shared, parts=device.empty(4), states=states, n_splits=2, block_heads=3),
        (2, 1, n_rows),
        shared=attend_shared_bytes(3, width),
    )
    join = Join(states=states, out=state, n_rows=n_rows * 3, n_joined=2, n_splits=2)
    device.launch("join_states", join, (1,))
    sums = device.empty(n_pages * 4)
    columns = Columns(
        **shared, states=state, sums=sums, n_rows=n_rows, sums_stride=n_pages, squares=1
    )
    device.launch("column_sums", columns, (-(-n_pages // 4), 1))
    got = device.get(sums, expected.shape, np.float32)
    np.testing.assert_allclose(got, expected, rtol=3e-5)

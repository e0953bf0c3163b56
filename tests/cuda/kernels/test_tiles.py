"""Attention of prompts on tensor cores, and its column sums, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda.packing import ORDERS
from tools.cuda_driver import (
    AttendTiles,
    Cache,
    Columns,
    Device,
    Heads,
    KeyList,
    ListedRows,
    Structure,
    attend_tiles_bytes,
    column_parts,
    column_tiles_bytes,
    tile_dim,
)

TILE = 64
N_KV, CONTEXT, SCALE = 2, 800, 0.2
# A query is the sum of two halves; weights of values are one.
LOGIT_TOLERANCE, OUTPUT_TOLERANCE = 2e-5, 5e-4


@dataclass(frozen=True)
class Shape:
    key_dim: int
    value_dim: int
    group: int = 2

    @property
    def n_heads(self) -> int:
        return N_KV * self.group

    @property
    def stride(self) -> int:
        return (self.n_heads + N_KV) * self.key_dim + N_KV * self.value_dim

    @property
    def tile_dim(self) -> int:
        return tile_dim(self.key_dim, self.value_dim)

    @property
    def heads(self) -> Structure:
        return Heads(
            n_heads=self.n_heads, n_kv_heads=N_KV, key_dim=self.key_dim, value_dim=self.value_dim,
            value_stride=self.value_dim,
        )  # fmt: skip


SHAPES = [Shape(64, 64), Shape(24, 40, 3), Shape(128, 128, 1), Shape(96, 80), Shape(8, 128)]
SHAPES += [Shape(256, 256, 1), Shape(192, 128)]


def quantised(rows: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Rows in blocks of 32 as q8_0 has them, and what these stand for."""
    blocks = rows.reshape(*rows.shape[:-1], -1, 32)
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    quants = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    stored = np.concatenate((scales.view(np.uint8), quants.view(np.uint8)), axis=-1)
    values = quants * scales.astype(np.float64)
    return stored.reshape(*rows.shape[:-1], -1), values.reshape(rows.shape)


class Case:
    """Queries over a cache: what they are given, and answers in float64 to lists of keys."""

    def __init__(self, device: Device, shape: Shape, first: int, n_rows: int, q8: bool = False):
        random = np.random.default_rng(first + n_rows)
        self.device, self.shape, self.first, self.n_rows = device, shape, first, n_rows
        self.qkv = random.normal(size=(n_rows, shape.stride)).astype(np.float32)
        n_known = first + n_rows
        rows = []
        stored = []
        for dim in (shape.key_dim, shape.value_dim):
            known = random.normal(size=(N_KV, n_known, dim)).astype(np.float32)
            if q8:
                there, values = quantised(known)
                there = np.pad(there, ((0, 0), (0, CONTEXT - n_known), (0, 0)))
            else:  # what was not written yet must not be read
                there = np.full((N_KV, CONTEXT, dim), np.nan, np.float16)
                there[:, :n_known] = known
                values = there[:, :n_known].astype(np.float64)
            stored.append(there)
            rows.append(values)
        self.keys, self.values = rows
        kind = 2 if q8 else 0
        self.cache = Cache(
            k=device.put(stored[0]), v=device.put(stored[1]), max_context=CONTEXT, k_type=kind,
            v_type=kind,
        )  # fmt: skip
        self.shared = {
            "qkv": device.put(self.qkv), "heads": shape.heads, "stride": shape.stride,
            "first": first, "n_rows": n_rows, "scale": SCALE,
        }  # fmt: skip

    def logits(self, row: int, head: int, keys: NDArray[Any], soft_cap: float) -> NDArray[Any]:
        dim = self.shape.key_dim
        q = self.qkv[row, head * dim : (head + 1) * dim].astype(np.float64)
        logits = keys.astype(np.float64) @ q * SCALE
        return soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits

    def attend(self, lists: list[dict[str, Any]], **options: Any) -> NDArray[np.float32]:
        shape = self.shape
        n_out = self.n_rows * shape.n_heads * shape.value_dim
        out = self.device.put(np.full(n_out, np.nan, np.float32))
        arguments = AttendTiles(
            **self.shared, lists=(ListedRows * 3)(*(ListedRows(**each) for each in lists)),
            n_lists=len(lists), out=out, out_stride=shape.n_heads * shape.value_dim, **options,
        )  # fmt: skip
        grid = (-(-self.n_rows // TILE), shape.n_heads)
        self.device.launch(
            f"attend_tiles_{shape.tile_dim}",
            arguments,
            grid,
            shared=attend_tiles_bytes(shape.tile_dim),
        )
        return self.device.get(out, (self.n_rows, shape.n_heads, shape.value_dim), np.float32)

    def columns(self, width: int, **options: Any) -> NDArray[np.float32]:
        """Sums of all parts of the rows; -1 where the kernel writes nothing."""
        n_parts = column_parts(self.n_rows)
        at = self.device.put(np.full((n_parts, N_KV, width), -1, np.float32))
        arguments = Columns(
            **self.shared, cache=self.cache, sums=at, sums_stride=width, part_stride=N_KV * width,
            **options,
        )  # fmt: skip
        dim = self.shape.tile_dim
        grid = (-(-width // TILE), N_KV, n_parts)
        self.device.launch(f"column_tiles_{dim}", arguments, grid, shared=column_tiles_bytes(dim))
        parts = self.device.get(at, (n_parts, N_KV, width), np.float32)
        unwritten = parts == -1
        np.testing.assert_array_equal(unwritten, unwritten[:1].repeat(n_parts, 0))
        return np.where(unwritten[0], -1, parts.sum(0))


def close(got: NDArray[Any], expected: NDArray[Any]) -> None:
    """Within the rounding of weights, which is relative to the size of what is added up."""
    np.testing.assert_allclose(got, expected, rtol=OUTPUT_TOLERANCE, atol=OUTPUT_TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("first", "n_rows", "window", "soft_cap", "sink"),
    [
        *[(0, 16, 0, 0.0, None), (0, 130, 0, 0.0, None), (150, 70, 0, 2.0, None)],
        *[(150, 70, 40, 0.0, None), (130, 100, 65, 0.0, 2.0), (3, 17, 1, 0.0, 90.0)],
    ],
)
def test_rows_attend_to_all_before_them(
    device: Device, shape: Shape, first: int, n_rows: int, window: int, soft_cap: float,
    sink: float | None,
) -> None:  # fmt: skip
    case = Case(device, shape, first, n_rows)
    sinks = None if sink is None else np.linspace(sink, sink + 2, shape.n_heads, dtype=np.float32)
    expected = np.zeros((n_rows, shape.n_heads, shape.value_dim))
    for row in range(n_rows):
        end = first + row + 1
        begin = max(0, end - window) if window else 0
        for head in range(shape.n_heads):
            kv_head = head // shape.group
            logits = case.logits(row, head, case.keys[kv_head, begin:end], soft_cap)
            most = max(logits.max(), -np.inf if sinks is None else sinks[head])
            weights = np.exp(logits - most)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - most))
            expected[row, head] = weights / total @ case.values[kv_head, begin:end]
    results = [
        case.attend(
            [{"cache": case.cache, "keys": KeyList(window=window)}], soft_cap=soft_cap,
            sinks=None if sinks is None else device.put(sinks),
        )
        for _ in range(ORDERS if n_rows < 100 else 1)
    ]  # fmt: skip
    close(results[0], expected)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("shape", [Shape(64, 64), Shape(96, 32)], ids=str)
def test_a_cache_in_8_bits(device: Device, shape: Shape) -> None:
    case = Case(device, shape, 40, 70, q8=True)
    got = case.attend([{"cache": case.cache, "keys": KeyList()}])
    for row in range(case.n_rows):
        for head in range(shape.n_heads):
            kv_head, end = head // shape.group, case.first + row + 1
            logits = case.logits(row, head, case.keys[kv_head, :end], 0.0)
            weights = np.exp(logits - logits.max())
            answer = weights / weights.sum() @ case.values[kv_head, :end]
            # Keys and values are rounded once more, to f16.
            np.testing.assert_allclose(got[row, head], answer, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize(
    ("shape", "soft_cap", "weight", "n_last", "squares", "n_rows"),
    [
        (Shape(64, 64), 0.0, 0, 0, 0, 70),
        (Shape(24, 40, 3), 2.0, 1, 0, 0, 70),
        (Shape(96, 80), 0.0, 2, 3, 1, 70),
        (Shape(128, 128, 1), 0.0, 0, 0, 0, 70),
        (Shape(256, 256), 0.0, 0, 0, 0, 70),
        (Shape(32, 32, 1), 0.0, 1, 0, 0, 530),  # columns in three parts
        (Shape(32, 32, 1), 0.0, 2, 20, 0, 270),
    ],
)
def test_a_chunk_its_memory_and_rows_that_stand_for_several(
    device: Device, shape: Shape, soft_cap: float, weight: int, n_last: int, squares: int,
    n_rows: int, is_joint: bool,
) -> None:  # fmt: skip
    """One softmax of three lists; column sums of the first two, by their own or the joint one."""
    random = np.random.default_rng(3)
    first, n_more = 200, 66
    case = Case(device, shape, first, n_rows)
    counts, more_counts = np.array([140, 5], np.uint32), np.array([2, n_more], np.uint32)
    positions = np.full((N_KV, 150), -1, np.int32)
    for head, count in enumerate(counts):
        positions[head, :count] = np.sort(random.choice(first, count, replace=False))
    more_k = random.normal(size=(N_KV, n_more, shape.key_dim)).astype(np.float32)
    more_v = random.normal(size=(N_KV, n_more, shape.value_dim)).astype(np.float32)
    biases = random.uniform(0, 4, size=(N_KV, n_more)).astype(np.float32)
    # Floats that f16 has exactly: others would be rounded to those.
    more_k, more_v = (x.astype(np.float16).astype(np.float32) for x in (more_k, more_v))
    more_k[0, 2:] = more_v[0, 2:] = biases[0, 2:] = np.nan  # nobody reads them
    sinks = np.linspace(-1, 3, shape.n_heads, dtype=np.float32)

    expected = np.zeros((n_rows, shape.n_heads, shape.value_dim))
    sums = [np.zeros((N_KV, n_rows)), np.zeros((N_KV, 150))]
    for row in range(n_rows):
        for head in range(shape.n_heads):
            kv_head = head // shape.group
            own = np.arange(first, first + row + 1)
            listed, n_synthetic = positions[kv_head, : counts[kv_head]], more_counts[kv_head]
            keys = [
                case.keys[kv_head, own],
                case.keys[kv_head, listed],
                more_k[kv_head, :n_synthetic],
            ]
            values = [
                case.values[kv_head, own],
                case.values[kv_head, listed],
                more_v[kv_head, :n_synthetic],
            ]
            logits = [case.logits(row, head, each, soft_cap) for each in keys]
            logits[2] = logits[2] + biases[kv_head, :n_synthetic]
            joint = np.exp(sinks[head]) + sum(np.exp(each).sum() for each in logits)
            expected[row, head] = np.exp(np.concatenate(logits)) / joint @ np.concatenate(values)
            for part in range(2):
                share = np.exp(logits[part]) / (joint if is_joint else np.exp(logits[part]).sum())
                counted = (1, len(share), float(row + n_last >= n_rows))[weight]
                sums[part][kv_head, : len(share)] += (share**2 if squares else share) * counted

    part_floats = n_rows * shape.n_heads * 2
    states = device.empty(2 * part_floats * 4)
    own_keys = KeyList(lowest=first)
    memory = KeyList(positions=device.put(positions), counts=device.put(counts), stride=150)
    more = Cache(k=device.put(more_k), v=device.put(more_v), max_context=n_more, k_type=1, v_type=1)
    got = case.attend(
        [
            {"cache": case.cache, "keys": own_keys},
            {"cache": case.cache, "keys": memory},
            {"cache": more, "keys": KeyList(counts=device.put(more_counts)),
             "biases": device.put(biases)},
        ],
        soft_cap=soft_cap, sinks=device.put(sinks), states=states, part_floats=part_floats,
        is_joint=is_joint,
    )  # fmt: skip
    close(got, expected)
    is_scored = device.put(np.array([0, 1], np.uint32))
    for part, keys in enumerate((own_keys, memory)):
        width = sums[part].shape[1]
        options = {
            "states": states + (0 if is_joint else part * part_floats * 4), "keys": keys,
            "soft_cap": soft_cap, "weight": weight, "n_last": n_last, "squares": squares,
        }  # fmt: skip
        for scored in (None, is_scored):
            got = case.columns(width, is_scored=scored, **options)
            for head in range(N_KV):
                n = n_rows if part == 0 else counts[head]
                if scored is not None and head == 0:
                    assert (got[0] == -1).all()
                    continue
                # Those of the joint softmax divide by the weight of rows that were rounded to f16.
                tolerance = 2e-4 if is_joint else LOGIT_TOLERANCE
                np.testing.assert_allclose(
                    got[head, :n], sums[part][head, :n], rtol=tolerance, atol=1e-6
                )
                assert (got[head, n:] == -1).all()

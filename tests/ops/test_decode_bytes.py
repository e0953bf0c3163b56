"""What generated tokens read of the cache, in bytes."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, SamplingParams, _core, python_policy
from tests.model.model_pair import random_tokens
from tests.ops.attention_case import Shape, decode, make_attention, prefill
from tests.reference.cached_rows import gathered_type
from tests.reference.pages import BLOCK_PAGES
from tests.reference.qkv import random_qkv
from tests.tiny_models import TinyModelFactory

SHAPE = Shape(head_dim=32)
ROW_BYTES = {"f16": 2 * 2 * 32, "f32": 2 * 4 * 32, "q8_0": 2 * 34, "q8_0/f16": 34 + 2 * 32}
N = 200


def _bytes_of_one(policy: _core.SparsePolicy, cache_type: str = "f16") -> int:
    qkv = random_qkv(1, n_tokens=N + 1, **SHAPE.heads)
    sizes = {"chunk_size": 64, "max_context": N + 1}
    attention = make_attention(policy, SHAPE, cache_type=cache_type, **sizes)
    prefill(attention, qkv, ends=(N,))
    assert attention.decode_bytes == 0
    decode(attention, qkv, N)
    return attention.decode_bytes


@pytest.mark.parametrize("cache_type", ROW_BYTES)
def test_dense_decode_reads_everything(cache_type: str) -> None:
    n_bytes = SHAPE.n_kv_heads * (N + 1) * ROW_BYTES[cache_type]
    assert _bytes_of_one(_core.dense_policy(), cache_type) == n_bytes


class Few:
    def select_memory(self, *_: object) -> list[int]:
        return []

    def select_decode(self, layer: int, kv_head: int, *_: object) -> list[int]:
        return [1, 50, 51, 120][: 2 + kv_head]


def test_listed_positions() -> None:
    assert _bytes_of_one(python_policy(Few())) == (3 + 4) * ROW_BYTES["f16"]


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
def test_rows_gathered_of_a_prompt(cache_type: str) -> None:
    """A budget and recent ones, the landmarks of three pages, and the token's own."""
    policy = _core.headwise_policy([24, 40], local=8, sinks=3, page_size=64, decode_from=64)
    n_rows = (24 + 8) + (40 + 8) + 2 * (N // 64)
    kept = n_rows * ROW_BYTES[gathered_type(cache_type)]
    assert _bytes_of_one(policy, cache_type) == kept + 2 * ROW_BYTES[cache_type]


@pytest.mark.parametrize("cache_type", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize("n_pages", [0, 10])
def test_prompts_that_heads_without_a_budget_read(cache_type: str, n_pages: int) -> None:
    """All of it, or pages and what follows their last block; besides what a budget holds."""
    policy = _core.headwise_policy(
        [24, None], local=8, sinks=3, page_size=0, decode_from=64, decode_pages=n_pages
    )
    n_rest = N % (4 * BLOCK_PAGES)
    n_rows = 24 + 8 + (4 * n_pages + n_rest if n_pages else N)
    bounds = N // (4 * BLOCK_PAGES) * 2 * SHAPE.head_dim * 34 if n_pages else 0
    kept = n_rows * ROW_BYTES[gathered_type(cache_type)]
    assert _bytes_of_one(policy, cache_type) == kept + bounds + 2 * ROW_BYTES[cache_type]


@pytest.mark.parametrize("until", [N - 1, N, N + 1])
def test_a_copy_does_not_depend_on_the_room_behind_it(until: int) -> None:
    """Of a prompt that is served, in a context that holds longer ones which are not."""
    policy = _core.headwise_policy(
        [24, None], local=8, sinks=3, page_size=0, decode_from=64, decode_until=until
    )
    qkv = random_qkv(1, n_tokens=N + 1, **SHAPE.heads)
    attention = make_attention(policy, SHAPE, cache_type="f16", chunk_size=64, max_context=4 * N)
    prefill(attention, qkv, ends=(N,))
    decode(attention, qkv, N)
    own = 2 * ROW_BYTES["f16"]
    if until >= N:
        assert attention.decode_bytes == (24 + 8 + N) * ROW_BYTES["q8_0"] + own
    else:
        assert attention.decode_bytes == 2 * N * ROW_BYTES["f16"] + own


def test_pages_and_their_bounds() -> None:
    n_blocks = N // (2 * BLOCK_PAGES)
    n_rest = N - n_blocks * BLOCK_PAGES * 2
    n_rows = 20 + n_rest + 1
    policy = _core.quest_policy(tokens=20, page_size=2, dense_layers=0)
    bounds = n_blocks * 2 * SHAPE.head_dim * 34
    assert _bytes_of_one(policy) == SHAPE.n_kv_heads * (n_rows * ROW_BYTES["f16"] + bounds)


def test_tokens_and_landmarks_of_a_rule_by_distance() -> None:
    policy = _core.ruvllm_policy(window=16, block_size=20)
    n_tokens = 16 + 1 + 1 + 3  # the window, itself, token 0, and those at 200 - 32, - 64, - 128
    n_landmarks = 5  # blocks 9, 8, 7, 5 and 1
    n_rows = n_tokens + n_landmarks
    assert _bytes_of_one(policy) == SHAPE.n_kv_heads * n_rows * ROW_BYTES["f16"]


def test_tokens_of_one_call_share_rows(tiny_model: TinyModelFactory) -> None:
    with LLM(tiny_model(), attention=DenseConfig(), context_size=128) as llm:
        runner = llm.start_runner(128)
        runner.prefill(random_tokens(100), is_last=True)
        runner.decode_batch(np.arange(5, 9, dtype=np.int32))  # type: ignore[attr-defined]
        heads = sum(layer.n_kv_heads for layer in llm.config.layers)
        assert runner.decode_bytes == heads * 104 * ROW_BYTES["f16"]
        sampling = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, lookup="off")
        stats = llm.generate(random_tokens(50).tolist(), sampling).stats
    mean = np.mean([51 + i for i in range(8)])
    assert stats.cache_bytes_per_token == heads * mean * ROW_BYTES["f16"]
    assert "of the cache for each)" in stats.format_table()
    assert stats.to_dict()["cache_bytes_per_token"] == stats.cache_bytes_per_token

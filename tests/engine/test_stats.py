"""Statistics as a table and as plain values."""

from __future__ import annotations

import json
from dataclasses import replace

from edgeh2o.engine.results import GenerationResult
from edgeh2o.engine.stats import GenerationStats

STATS = GenerationStats(
    model="tiny.gguf",
    isa="avx2",
    threads=2,
    attention={"algorithm": "h2o", "local": 256, "heavy": 128},
    batch_size=4096,
    chunk_size=1024,
    context_size=8192,
    cache_type="f16",
    attention_precision="f32",
    seed=7,
    prompt_tokens=4500,
    cached_tokens=0,
    generated_tokens=31,
    load_s=0.25,
    prefill_s=2.0,
    ttft_s=2.125,
    decode_s=1.5,
    prefill_tps=2250.0,
    decode_tps=20.0,
    peak_rss_bytes=300 * 2**20,
    pairs_computed=4_000_000,
    pairs_dense=10_000_000,
    memory_bytes={"weights": 90 * 2**20, "kv_cache": 180 * 2**20},
)


def test_statistics_and_results_can_be_keys() -> None:
    result = GenerationResult(
        text="a", token_ids=(5,), logprobs=None, finish_reason="stop", stats=STATS
    )
    assert {STATS: 1, result: 2} == {replace(STATS): 1, replace(result): 2}
    assert hash(STATS) != hash(replace(STATS, seed=8))


def test_table() -> None:
    assert STATS.format_table().splitlines() == [
        "load         0.25 s",
        "first token  2.12 s",
        "prefill      4,500 tokens, 2,250.0 tokens/s",
        "decode       31 tokens, 20.0 tokens/s",
        "pairs        4,000,000 of 10,000,000 dense (2.50x fewer)",
        "memory       peak RSS 300 MiB (weights 90.0 MiB, kv cache 180 MiB)",
        "run          avx2, threads 2, h2o local 256 heavy 128, seed 7",
    ]


def test_table_says_what_the_sparse_attention_costs() -> None:
    measured = replace(STATS, attention_error=0.0321)
    assert measured.format_table().splitlines()[-2] == "attention    error 3.2 %"
    guarded = replace(measured, heads_read_densely=4, note="as it was")
    assert (
        guarded.format_table().splitlines()[-2]
        == "attention    error 3.2 %, 4 heads read densely; as it was"
    )


def test_table_of_a_run_that_was_stopped_early() -> None:
    early = replace(
        STATS, ttft_s=None, prefill_tps=None, decode_tps=None, pairs_computed=0, pairs_dense=0
    )
    lines = early.format_table().splitlines()
    assert lines[1:5] == [
        "first token  -",
        "prefill      0 of 4,500 tokens, -",
        "decode       31 tokens, -",
        "pairs        0 of 0 dense",
    ]
    half = replace(early, prefill_tps=512.0, prefill_s=4.0)
    assert half.format_table().splitlines()[2] == (
        "prefill      2,048 of 4,500 tokens, 512.0 tokens/s"
    )


def test_plain_values_survive_json() -> None:
    values = json.loads(json.dumps(STATS.to_dict()))
    assert values == STATS.to_dict()
    assert values["memory_bytes"]["kv_cache"] == 180 * 2**20

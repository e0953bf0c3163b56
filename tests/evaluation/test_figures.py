"""Pictures of results that fit badly: ``checked_picture`` looks at each."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeh2o.evaluation import figures
from edgeh2o.evaluation.throughput import Throughput, Workload
from tests.evaluation.pictures import png_size

LONG_NAME = "Meta-Llama-3.1-8B-Instruct-some-fine-tune-v2.Q4_K_M-00001-of-00003.gguf"


def make_throughput(mode: str, n_prompt: int, n_threads: int) -> Throughput:
    return Throughput(
        model=LONG_NAME,
        isa="avx512vnni",
        threads=n_threads,
        mode=mode,
        attention="headwise budget 512 local 128",
        batch_size=4096,
        chunk_size=256,
        cache_type="f16",
        attention_precision="f32",
        workload=Workload(n_prompt=n_prompt),
        keys_per_query=100.0,
        samples_tps=(1000.0 * n_threads, 1200.0 * n_threads),
        memory_bytes={"weights": 5 * 2**30, "kv_cache": 2**30, "scores": 2**20},
    )


@pytest.mark.parametrize("n_prompts", [(512,), (128, 512, 1024, 2048, 4096, 8192)], ids=len)
def test_long_names_and_many_bars_fit(n_prompts: tuple[int, ...], tmp_path: Path) -> None:
    results = [
        make_throughput(mode, n_prompt, n_threads)
        for n_threads in (1, 2, 4)
        for n_prompt in n_prompts
        for mode in ("dense", "sparse")
    ]
    figures.draw_memory(results, tmp_path / "memory.png")
    figures.draw_throughput(results, tmp_path / "throughput.png", peer={"peer": [(512, 700.0)]})
    assert png_size(tmp_path / "memory.png")[0] == 495 + 220 * len(n_prompts)
    assert png_size(tmp_path / "throughput.png") == (1100, 660)


def test_short_names_stay_and_long_ones_keep_both_ends() -> None:
    assert figures.shorten_name("m.Q4_0.gguf") == "m.Q4_0.gguf"
    assert figures.shorten_name(LONG_NAME) == "Meta-Llama-3.1-8B-Instruct-...1-of-00003.gguf"
    assert figures.shorten_name("x" * 45) == "x" * 45
    assert len(figures.shorten_name("x" * 46)) == 45

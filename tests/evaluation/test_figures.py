"""Pictures of results that fit badly: ``checked_picture`` looks at each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edgeh2o.evaluation import figures
from edgeh2o.evaluation.throughput import Throughput, Workload
from tests.evaluation.pictures import checked_picture, png_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def test_equal_results_of_one_length_stay_off_the_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def check_markers(path: Path, width: float, height: float) -> Iterator[Figure]:
        with checked_picture(path, width, height) as figure:
            yield figure
            (axes,) = figure.axes
            shares = axes.transAxes.inverted().transform(
                [axes.transData.transform(line.get_xydata()[0]) for line in axes.lines]
            )
            assert len(shares) and shares.min() > 0.04 and shares.max() < 0.96

    monkeypatch.setattr(figures, "picture", check_markers)
    results = [
        replace(make_throughput(mode, 512, 2), attention=mode, samples_tps=(speed,))
        for mode, speed in (("dense", 1000.0), ("sparse", 1010.0))
    ]
    figures.draw_throughput(results, tmp_path / "speed.png")


def test_short_names_stay_and_long_ones_keep_both_ends() -> None:
    assert figures.shorten_name("m.Q4_0.gguf") == "m.Q4_0.gguf"
    assert figures.shorten_name(LONG_NAME) == "Meta-Llama-3.1-8B-Instruct-...1-of-00003.gguf"
    assert figures.shorten_name("x" * 45) == "x" * 45
    assert len(figures.shorten_name("x" * 46)) == 45

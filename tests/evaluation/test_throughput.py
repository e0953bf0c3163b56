"""What a benchmark runs and counts, with a clock that the test turns; llama-bench's CSV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeh2o import LLM, HeadwiseConfig, UsageError
from edgeh2o.attention import budget_points
from edgeh2o.attention.budget_table import write_table
from edgeh2o.evaluation import throughput
from edgeh2o.evaluation.ablation import evaluate_ablation
from edgeh2o.evaluation.llama_bench import read_llama_bench
from edgeh2o.evaluation.throughput import (
    Workload,
    benchmark_throughput,
    format_throughput,
    plan_workloads,
)
from tests.budget_tables import table_of_model
from tests.evaluation.loaded import TEXT, load
from tests.tiny_models import TinyModelFactory

# The columns of llama-bench that are read, and one that is not.
LLAMA_BENCH = """"model_type","n_threads","flash_attn","n_prompt","n_gen","avg_ts"
"llama","2","0","4096","0","60.5"
"llama","2","0","512","0","100.25"
"llama","2","0","0","64","33.0"
"llama","2","1","512","0","90.0"
"""


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    with load(tiny_model(tensor_type="Q8_0")) as loaded:
        yield loaded


class Clock:
    """Every reading is one second after the one before."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_tests_are_named_as_llama_bench_names_them() -> None:
    workloads = plan_workloads([512, 0], [64], [0, 8000])
    assert [workload.name for workload in workloads] == ["pp512", "tg64", "tg64 @ d8000"]
    assert [workload.n_positions for workload in workloads] == [512, 65, 8064]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (([0], [0], [0]), "nothing to measure"),
        (([], [], []), "nothing to measure"),
        (([5], [], [-1]), "at least 0, got -1"),
    ],
)
def test_workloads_out_of_range_are_refused(
    numbers: tuple[list[int], list[int], list[int]], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan_workloads(*numbers)


def test_samples_are_tokens_over_seconds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "time", Clock())
    progress: list[tuple[str, int, int]] = []
    workloads = [Workload(n_prompt=80), Workload(n_decode=5, depth=40), Workload(n_decode=3)]
    results = benchmark_throughput(
        llm,
        workloads,
        repetitions=2,
        text=TEXT,
        on_progress=lambda *step: progress.append(step),
    )
    assert [(result.workload, result.mode) for result in results] == [
        (workload, mode) for workload in workloads for mode in ("dense", "sparse")
    ]
    assert [result.samples_tps for result in results[::2]] == [(80, 80), (5, 5), (3, 3)]
    total = 3 * 2 * (80 + 45 + 4)
    assert progress[-1] == ("evaluate", total, total)
    dense, sparse = results[:2]
    assert dense.keys_per_query == 81 / 2
    assert sparse.keys_per_query < dense.keys_per_query
    assert sparse.attention == "h2o local 4 heavy 4"
    runner = llm.start_runner(80)
    assert sparse.memory_bytes == {"weights": llm.weight_bytes, **runner.memory_bytes}
    assert sparse.to_record()["memory_bytes"] == sum(sparse.memory_bytes.values())
    assert sparse.to_dict()["samples_tps"] == [80, 80]
    assert len(format_throughput(results).splitlines()) == 2 + len(results)


@pytest.mark.parametrize(("warm_up", "n_reads"), [(True, 3), (False, 2)])
def test_the_warm_up_is_not_counted(
    llm: LLM, warm_up: bool, n_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    time_run = throughput._time
    monkeypatch.setattr(throughput, "_time", lambda *args: reads.append(1) or time_run(*args))
    (result,) = benchmark_throughput(
        llm, [Workload(n_prompt=20)], repetitions=2, modes=["sparse"], warm_up=warm_up
    )
    assert len(reads) == n_reads
    assert len(result.samples_tps) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": ["fast"]}, "modes are dense and sparse, got fast"),
        ({"modes": []}, "got none"),
        ({"repetitions": 0}, "repetitions must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(
    llm: LLM, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        benchmark_throughput(llm, [Workload(n_prompt=20)], **options)


def test_llama_bench_gives_a_line_per_setting(tmp_path: Path) -> None:
    path = tmp_path / "llama.csv"
    path.write_text(LLAMA_BENCH)
    assert read_llama_bench(path) == {
        "llama.cpp fa off, 2 threads": [(512, 100.25), (4096, 60.5)],
        "llama.cpp fa on, 2 threads": [(512, 90.0)],
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("", "holds no prefill test"),
        ("a,b\n1,2\n", "is not what 'llama-bench -o csv' writes"),
        (LLAMA_BENCH.replace("100.25", "fast"), "is not what 'llama-bench -o csv' writes"),
        ("\n".join([LLAMA_BENCH.split("\n")[0], '"llama","2"']), "is not what"),
        ('"n_prompt","n_gen"\n"0","64"\n', "holds no prefill test"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "llama.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_llama_bench(path)


def test_a_budget_that_was_chosen_is_named(
    tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the prompts, which is larger for long ones."""
    monkeypatch.setattr(budget_points, "SHOWN_LENGTH", 256)
    with LLM(tiny_model(tensor_type="Q8_0", context_length=1024)) as llm:
        table = table_of_model(
            llm.config,
            ((1.0, 0.5),),
            chunk_size=256,
            length=256,
            mean_past=512.0,
            levels=(64, 128),
            losses={128: 0.0},
            texts=("none",),
        )
    write_table(table, tmp_path / "tiny.json")
    attention = HeadwiseConfig(budget_table=str(tmp_path / "tiny.json"))
    with LLM(tiny_model(tensor_type="Q8_0", context_length=1024), attention=attention) as llm:
        workloads = plan_workloads([256, 512], [4], [512])
        results = benchmark_throughput(
            llm, workloads, repetitions=1, modes=["sparse"], warm_up=False
        )
        names = [result.attention for result in results]
        table_name = f"budget_table {attention.budget_table}"
        assert names == [f"headwise budget {n} {table_name}" for n in (128, 192, 192)]
        rows = evaluate_ablation(
            llm, " ".join(map(str, range(600))), {"local": [16]}, context_size=512, windows=1
        )
        assert "budget 192" in rows.results[0].setting.attention.describe()

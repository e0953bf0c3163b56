"""A grid of settings gives what each setting gives on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from edgeh2o import LLM, DenseConfig, H2OConfig, HeadwiseConfig, PrefillConfig, UsageError
from edgeh2o.evaluation.ablation import evaluate_ablation, expand_grid
from edgeh2o.evaluation.perplexity import evaluate_perplexity
from tests.evaluation.loaded import PREFILL, TEXT, WINDOW, load
from tests.tiny_models import TinyModelFactory

ATTENTION = H2OConfig(local=4, heavy=4)
GRID = {"heavy": (2, 6), "chunk_size": (16, 32)}


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    with load(tiny_model(tensor_type="F32"), ATTENTION) as loaded:
        yield loaded


def test_the_last_field_varies_fastest() -> None:
    settings = expand_grid(ATTENTION, 16, GRID)
    assert [setting.values for setting in settings] == [
        {"heavy": 2, "chunk_size": 16},
        {"heavy": 2, "chunk_size": 32},
        {"heavy": 6, "chunk_size": 16},
        {"heavy": 6, "chunk_size": 32},
    ]
    assert [setting.chunk_size for setting in settings] == [16, 32, 16, 32]
    assert [setting.attention for setting in settings] == [
        replace(ATTENTION, heavy=heavy) for heavy in (2, 2, 6, 6)
    ]
    assert [setting.chunk_size for setting in expand_grid(DenseConfig(), 16, {})] == [16]


def test_budgets_are_clamped_to_each_chunk_size() -> None:
    with pytest.warns(UserWarning, match="must stay below the chunk size 8"):
        small, large = expand_grid(ATTENTION, 16, {"chunk_size": (8, 16)})
    assert small.attention.local + small.attention.heavy < 8
    assert large.attention == ATTENTION


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"budget": (1,)}, "h2o has no setting 'budget'; it has local, heavy, .*chunk_size"),
        ({"heavy": ()}, "no value for heavy"),
        ({"heavy": (1, -1)}, "heavy .* got -1"),
        ({"chunk_size": (0,)}, "must be an integer from 1"),
    ],
)
def test_grids_that_cannot_be_made_are_refused(
    grid: Mapping[str, Sequence[Any]], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        expand_grid(ATTENTION, 16, grid)


def test_what_a_measurement_found_is_no_setting() -> None:
    with pytest.raises(UsageError, match=r"no setting 'profile'; it has budget, .*tail, .*chunk"):
        expand_grid(HeadwiseConfig(), 256, {"profile": ("x",)})


def test_every_setting_gives_what_it_gives_alone(llm: LLM, tiny_model: TinyModelFactory) -> None:
    progress: list[tuple[str, int, int]] = []
    report = evaluate_ablation(
        llm,
        TEXT,
        GRID,
        context_size=WINDOW,
        windows=2,
        skip=32,
        on_progress=lambda *step: progress.append(step),
    )
    assert progress[-1] == ("evaluate", 8 * WINDOW, 8 * WINDOW)
    assert report.range_name == "after 32"
    assert report.dense_keys_per_query == (WINDOW + 1) / 2
    assert len(report.results) == 4
    whole = PrefillConfig(batch_size=WINDOW, chunk_size=32)
    path = tiny_model(tensor_type="F32")
    attention = replace(ATTENTION, heavy=6)
    with LLM(path, prefill=whole, attention=attention, attention_precision="f32") as alone:
        expected = evaluate_perplexity(alone, TEXT, context_size=WINDOW, windows=2, skip=32)
    last = report.results[-1]
    assert last.keys_per_query == expected.keys_per_query
    # Other batches add up column sums in another order, which can tip a choice between heavy
    # hitters: 4e-4 of the loss percentage with AVX2, below 1e-4 with AVX512.
    for quality, wanted in zip(last.ranges, expected.ranges, strict=True):
        assert quality.loss_percent == pytest.approx(wanted.loss_percent, rel=1e-3)
        assert quality.kl == pytest.approx(wanted.kl, rel=1e-3)
    costs = [result.keys_per_query for result in report.results]
    assert costs[0] < costs[2] < costs[3]


def test_records_hold_the_fields_of_the_grid(llm: LLM) -> None:
    report = evaluate_ablation(llm, TEXT, {"local": (2, 4)}, context_size=WINDOW)
    records = report.to_records()
    assert [record["local"] for record in records] == [2, 4]
    assert [record["range"] for record in records] == ["all", "all"]
    assert records[0]["attention"].startswith("h2o local 2 heavy 4")
    assert records[1]["chunk_size"] == PREFILL.chunk_size
    results = report.to_dict()["results"]
    assert results[1]["ranges"][0]["kl"] == records[1]["kl"]
    assert len(report.format_text().splitlines()) == 6

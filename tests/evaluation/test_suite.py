"""Texts that ask for their own beginning, and what a sparse prefill loses on them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, HeadwiseConfig
from edgeh2o.errors import UsageError
from edgeh2o.evaluation.comparison import WindowComparer
from edgeh2o.evaluation.long_texts import KINDS, make_window
from edgeh2o.evaluation.suite import evaluate_suite
from tests.evaluation.loaded import load
from tests.tiny_models import TinyModelFactory

LENGTH = 600


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    with load(tiny_model(context_length=2048), HeadwiseConfig(budget=8)) as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_made_by_seeds(llm: LLM, kind: str) -> None:
    windows = [make_window(llm, kind, LENGTH, seed=seed) for seed in (0, 0, 1)]
    assert [window.shape for window in windows] == [(LENGTH,)] * 3
    np.testing.assert_array_equal(windows[0], windows[1])
    assert not np.array_equal(windows[0], windows[2])


@pytest.mark.parametrize("kind", ["copied-prose", "copied-code"])
def test_a_copy_is_the_same_again(llm: LLM, kind: str) -> None:
    window = make_window(llm, kind, LENGTH)
    np.testing.assert_array_equal(window[1 : LENGTH // 2], window[LENGTH // 2 + 1 :])


def test_what_is_asked_was_said(llm: LLM) -> None:
    pairs = llm.detokenize(KINDS["pairs"](llm, LENGTH, 0))
    table, _, again = pairs.partition("\nSorted table\n")
    said, asked = table.splitlines()[1:], again.splitlines()
    assert sorted(said) == sorted(asked) and said != asked and len(said) == len(set(said)) > 5
    said, _, asked = (
        part.splitlines()
        for part in llm.detokenize(KINDS["facts"](llm, LENGTH, 0)).partition("\n\n")
    )
    facts = {line[len("The ") : -1].replace(" is ", "? Answer: ") for line in said}
    questions = {line[len("Question: What is the ") : -1] for line in asked}
    assert facts == questions and len(facts) > 2
    table, _, again = llm.detokenize(KINDS["table"](llm, LENGTH, 0)).partition("\n\n")
    rows = list(csv.DictReader(table.splitlines()))
    records = [{k: str(v) for k, v in json.loads(line).items()} for line in again.splitlines()]
    assert rows != records and len(rows) > 2
    assert {row["badge"]: row for row in rows} == {row["badge"]: row for row in records}
    dialogue = llm.detokenize(KINDS["dialogue"](llm, 4 * LENGTH, 0))
    assert dialogue.count("You told me that ") == dialogue.count("Do you remember ") > 1
    for answer in dialogue.split("You told me that ")[1:]:
        fact = answer[: answer.index(".")]
        assert f"By the way, {fact}." in dialogue


def test_the_last_quarter_is_scored_as_by_the_whole(llm: LLM) -> None:
    window = make_window(llm, "facts", LENGTH)
    dense, sparse = (
        llm.start_runner(LENGTH, attention=attention, all_rows=True)
        for attention in (DenseConfig(), None)
    )
    comparer = WindowComparer(dense)
    whole = comparer.compare(sparse, window)
    for first in (449, 32, 31, LENGTH - 2):
        part = comparer.compare(sparse, window, first=first)
        np.testing.assert_array_equal(part.kl, whole.kl[first:])
        np.testing.assert_array_equal(part.sparse_nll, whole.sparse_nll[first:])


def test_a_row_per_kind(llm: LLM) -> None:
    done: list[tuple[str, int, int]] = []
    report = evaluate_suite(
        llm,
        context_size=LENGTH,
        kinds=("pairs", "prose"),
        seeds=(0, 1, 2),
        on_progress=lambda *step: done.append(step),
    )
    assert [kind.kind for kind in report.kinds] == ["pairs", "prose"]
    assert all(kind.tokens == 3 * LENGTH // 4 and kind.kl > 0 for kind in report.kinds)
    assert 8 < report.keys_per_query < LENGTH / 4
    assert done[-1] == ("evaluate", 6, 6)
    lines = report.format_text().splitlines()
    assert "3 windows of 600 tokens of each kind" in lines[0]
    assert [record["kind"] for record in report.to_records()] == ["pairs", "prose"]
    assert report.to_dict()["seeds"] == (0, 1, 2)


def test_a_dense_rule_loses_nothing(llm: LLM) -> None:
    everything = HeadwiseConfig(budgets=(None,) * llm.config.n_slots)
    with load(llm.model_path, everything) as dense:
        report = evaluate_suite(dense, context_size=LENGTH, kinds=("pairs",), seeds=(0,))
    assert abs(report.kinds[0].loss_percent) < 0.1
    assert report.kinds[0].top1_percent > 95


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ("poems",)}, "no texts of kind 'poems'; use one of prose, code"),
        ({"context_size": 255}, "at least 256 tokens, got 255"),
        ({"seeds": ()}, "at least one seed"),
        ({"kinds": ("code",), "context_size": 2**20}, "too few for a window of 1048576"),
    ],
)
def test_what_cannot_be(llm: LLM, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate_suite(llm, **{"context_size": LENGTH, **settings})  # type: ignore[arg-type]


def test_a_window_need_not_be_whole_chunks(tiny_model: TinyModelFactory) -> None:
    """Of either side: those of a dense run are longer."""
    with LLM(tiny_model(context_length=2048), attention=HeadwiseConfig(budget=8)) as llm:
        report = evaluate_suite(llm, context_size=1300, kinds=["pairs"], seeds=[0])
    assert report.kinds[0].tokens == 325

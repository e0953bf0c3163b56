"""Tasks about long texts: what is asked was said, and answers go on from the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, H2OConfig
from edgeh2o.engine.generate import log_probability
from edgeh2o.errors import UsageError
from edgeh2o.evaluation import figures
from edgeh2o.evaluation.long_suite import Scores, _summarise, evaluate_tasks
from edgeh2o.evaluation.reading import prefill_prompt, split_answer
from edgeh2o.evaluation.tasks import N_EXAMPLES, QUESTION_TOKENS, TASKS, make_task
from tests.evaluation.loaded import load
from tests.evaluation.pictures import checked_picture, png_size
from tests.tiny_models import TinyModelFactory

LENGTH = 4000


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    with load(tiny_model(context_length=8192), H2OConfig(local=6, heavy=6)) as llm:
        yield llm


def read_task(llm: LLM, name: str, seed: int = 0) -> tuple[str, list[tuple[str, str]]]:
    task = make_task(llm, name, LENGTH, seed=seed)
    return llm.detokenize(task.context), list(task.questions)


@pytest.mark.parametrize("name", TASKS)
def test_texts_are_made_by_seeds_and_fill_their_length(llm: LLM, name: str) -> None:
    tasks = [make_task(llm, name, LENGTH, seed=seed) for seed in (0, 0, 1)]
    assert tasks[0] == tasks[1] != tasks[2]
    for task in tasks:
        assert LENGTH - QUESTION_TOKENS - 200 < len(task.context) <= LENGTH - QUESTION_TOKENS
        assert len(task.questions) == {"needles-4": 4, "needles-8": 8}.get(name, 10)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("n_questions", [1, 14])
def test_the_number_of_questions(llm: LLM, name: str, n_questions: int) -> None:
    questions = make_task(llm, name, LENGTH, n_questions=n_questions).questions
    most = min(n_questions, 10 if name == "count" else 14)
    wanted = {"needles-4": 4, "needles-8": 8}.get(name, most)
    assert len({*questions}) == wanted or name == "classify"
    assert len(questions) == wanted


@pytest.mark.parametrize("name", ["needles-4", "needles-8"])
def test_needles_are_hidden(llm: LLM, name: str) -> None:
    text, questions = read_task(llm, name)
    for question, answer in questions:
        assert f" {question.strip()}{answer}. " in f" {text}"
    assert text.count("special number of") == len(questions)


def test_entries_of_an_object(llm: LLM) -> None:
    text, questions = read_task(llm, "json")
    assert text.startswith("{\n") and text.endswith("}\n")
    for question, answer in questions:
        (key,) = re.findall('"(\\w+)": "$', question)
        assert f' "{key}": "{answer}",\n' in text


def test_variables_and_their_copies(llm: LLM) -> None:
    text, questions = read_task(llm, "variables")
    values: dict[str, str] = {}
    for name, value in re.findall(r"VAR (\w+) = (\w+)\.", text):
        values[name] = values.get(value, value)
    names = [question.split()[-2] for question, _ in questions]
    assert [f" {values[name]}" for name in names] == [answer for _, answer in questions]
    assert len(values) == 2 * len(questions)


def test_sentences_are_copied(llm: LLM) -> None:
    text, questions = read_task(llm, "copy")
    for question, answer in questions:
        beginning = question.removeprefix("\nOnce more: ")
        assert text.count(f"\n{beginning}") == text.count(f"\n{beginning}{answer}") == 1
        assert len(answer.split()) == 4


def test_words_are_counted(llm: LLM) -> None:
    text, questions = read_task(llm, "count")
    for question, answer in questions:
        word = re.findall(r"marked word (\w+)", question)[0]
        assert text.count(f"Marked word: {word}.") == int(answer)


def test_examples_have_labels(llm: LLM) -> None:
    text, questions = read_task(llm, "classify")
    labels = re.findall(r"Label: (\w+)\n", text)
    assert len(labels) == N_EXAMPLES
    topics = dict(re.findall(r"talked about ([\w -]+)\..*\nLabel: (\w+)", text))
    asked = [(question.split(" about ")[1].split(".")[0], answer) for question, answer in questions]
    known = [(topics[what], answer[1:]) for what, answer in asked if what in topics]
    assert known and all(label == answer for label, answer in known)


def test_a_dialogue_is_remembered(llm: LLM) -> None:
    text, questions = read_task(llm, "dialogue")
    for question, answer in questions:
        fact = question.partition("You told me that ")[2]
        assert f"By the way, {fact}{answer}." in text


def test_answers_go_on_from_the_text(llm: LLM) -> None:
    """A question that is asked after others is asked as if there had been none."""
    report = evaluate_tasks(llm, context_size=600, tasks=("needles-4",), seeds=(0,))
    task = make_task(llm, "needles-4", 600, seed=0)
    context = np.array(task.context, np.int32)
    logprobs = []
    runner = llm.start_runner(600)
    for question, text in task.questions:
        tokens, answer = split_answer(llm, question, text)
        prefill_prompt(runner, context, stays_open=True)
        logits = prefill_prompt(runner, tokens, n_read=len(context), stays_open=True)
        steps = [logits, *(runner.decode(token) for token in answer[:-1])]
        pairs = zip(steps, answer, strict=True)
        logprobs.append(np.mean([log_probability(step, token) for step, token in pairs]))
    (result,) = report.tasks
    assert result.questions == 4
    assert result.sparse_logprob == pytest.approx(np.mean(logprobs), rel=1e-6)
    assert result.sparse_logprob != result.dense_logprob
    assert report.keys_per_query < 80


def test_a_row_per_task_and_a_picture(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int, int]] = []
    report = evaluate_tasks(
        llm,
        context_size=700,
        tasks=("json", "dialogue"),
        seeds=(3, 4),
        on_progress=lambda *step: done.append(step),
    )
    assert done[-1] == ("evaluate", 4, 4)
    assert [task.task for task in report.tasks] == ["json", "dialogue"]
    assert "2 texts of 700 tokens for each task" in report.format_text()
    assert report.to_dict()["seeds"] == (3, 4)
    assert [record["task"] for record in report.to_records()] == ["json", "dialogue"]
    monkeypatch.setattr(figures, "picture", checked_picture)
    figures.draw_tasks(report, tmp_path / "tasks.png")
    assert png_size(tmp_path / "tasks.png")[0] > 400


def test_differences_are_paired_by_text() -> None:
    def answers(*right: bool) -> Scores:
        return [(each, -1.0 if each else -3.0) for each in right]

    texts = [
        (answers(True, True), answers(True, False)),
        (answers(True, False), answers(True, False)),
        (answers(True, True), answers(True, True)),
    ]
    quality = _summarise("x", texts)
    assert (quality.questions, quality.dense_percent) == (6, pytest.approx(500 / 6))
    assert quality.difference == pytest.approx(-100 / 6)
    assert quality.difference_error == pytest.approx(100 * np.std([-0.5, 0, 0], ddof=1) / 3**0.5)
    assert quality.sparse_logprob == pytest.approx(-1 - 2 * 2 / 6)
    (alone,) = texts[:1]
    assert _summarise("x", [alone]).difference_error == pytest.approx(50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ("poems",)}, "no task 'poems'; use one of needles-4, needles-8"),
        ({"context_size": 160, "tasks": ("needles-8",)}, "no room for 8 things to find"),
        ({"context_size": 100, "tasks": ("json",)}, "too short for this task"),
        ({"seeds": ()}, "at least one seed"),
        ({"n_questions": 0}, "at least one question about a text, not 0"),
    ],
)
def test_what_cannot_be(llm: LLM, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate_tasks(llm, **{"context_size": LENGTH, **settings})  # type: ignore[arg-type]

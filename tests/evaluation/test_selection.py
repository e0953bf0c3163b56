"""Recorded choices against the policy of one long prefill; similarities counted by hand."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, H2OConfig, ResourceError, UsageError
from edgeh2o.evaluation import figures
from edgeh2o.evaluation.attention_patterns import draw_layer, visualize_attention_patterns
from edgeh2o.evaluation.selection import (
    Selection,
    chunk_similarity,
    describe_selection,
    head_similarity,
    record_selection,
    run_similarity,
    similarity,
    similarity_matrix,
    sink_kept,
    sink_score,
)
from tests.evaluation.loaded import PREFILL, TEXT, WINDOW, load
from tests.evaluation.pictures import png_size
from tests.tiny_models import TinyModelFactory


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModelFactory) -> Iterator[LLM]:
    with load(tiny_model(tensor_type="F32"), H2OConfig(local=3, heavy=5)) as loaded:
        yield loaded


def tokens_of(llm: LLM, n_tokens: int) -> np.ndarray:
    return np.array(llm.tokenize(TEXT)[:n_tokens], np.int32)


def make_selection(*chunks: tuple[list[int], ...], size: int = 4) -> Selection:
    """A layer with as many KV heads as every chunk has lists; chunks of ``size`` tokens."""
    n_heads = len(chunks[0])
    return Selection(
        n_tokens=size * (len(chunks) + 1),
        n_layers=1,
        n_layer_heads=n_heads,
        begins=tuple(size * (index + 1) for index in range(len(chunks))),
        memory=tuple(tuple(np.array(head, np.int32) for head in chunk) for chunk in chunks),
        scores=(None,) * n_heads,
    )


def test_every_choice_of_every_chunk_is_recorded(llm: LLM) -> None:
    counted: list[int] = []
    tokens = tokens_of(llm, WINDOW - 5)
    selection = record_selection(llm, tokens, on_tokens=counted.append)
    assert selection.begins == (16, 32, 48, 64, 80)
    assert counted == [16] * 5 + [11]
    assert (selection.n_layers, selection.n_layer_heads, selection.n_slots) == (3, 2, 6)
    for chunk, begin in enumerate(selection.begins):
        # The latest chunk of a prompt that ends after this one made the same choice.
        runner = llm.start_runner(WINDOW, all_rows=True)
        end = min(begin + 16, len(tokens))
        for first in range(0, end, PREFILL.batch_size):
            last = min(first + PREFILL.batch_size, end)
            runner.prefill(tokens[first:last], is_last=last == end)
        for slot in range(6):
            chosen = runner.policy.memory_set(slot // 2, slot % 2)
            np.testing.assert_array_equal(selection.memory[chunk][slot], chosen)
            assert len(chosen) == 8
            assert set(range(begin - 3, begin)) <= set(chosen.tolist())
    np.testing.assert_allclose(
        selection.scores[5], runner.policy.scores(2, 1, len(tokens)), rtol=1e-5
    )


def test_masks_hold_the_chosen_positions() -> None:
    selection = make_selection(([0, 3], [1]), ([2, 7], []))
    np.testing.assert_array_equal(
        selection.kept(0), [[True, False, False, True], [False, True, False, False]]
    )
    assert selection.kept(1).shape == (2, 8)
    assert selection.kept(1).sum() == 2


def test_similarity_is_shared_over_either() -> None:
    first = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]], np.bool_)
    second = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]], np.bool_)
    np.testing.assert_allclose(similarity(first, second), [1 / 3, 1, 1, 0])
    matrix = similarity_matrix(first)
    np.testing.assert_allclose(matrix, matrix.T)
    np.testing.assert_allclose(matrix[0], [1, 1 / 2, 0, 0])
    np.testing.assert_allclose(np.diag(matrix), 1)


def test_next_chunks_are_compared_on_the_past_of_both() -> None:
    selection = make_selection(([0, 3], [1]), ([0, 7], [2, 6]))
    np.testing.assert_allclose(chunk_similarity(selection), [1 / 2, 0])
    assert chunk_similarity(make_selection(([0], [1]))) is None


def test_heads_are_compared_without_what_all_keep() -> None:
    selection = make_selection(([0, 1, 3], [1, 2, 3]), ([5, 7], [5, 7]))
    expected = (0 + 1) / 2  # the first chunk's {0} and {2}, then two empty sets
    np.testing.assert_allclose(head_similarity(selection), [[1, expected], [expected, 1]])


def test_runs_are_compared_chunk_by_chunk() -> None:
    first = make_selection(([0, 1],), ([0, 4],))
    second = make_selection(([0, 1],), ([0, 5],))
    np.testing.assert_allclose(run_similarity(first, second), [(1 + 1 / 3) / 2])


def test_sinks_are_the_first_four_positions() -> None:
    selection = make_selection(([0, 1, 5], []), ([3, 9], [0, 1, 2, 3]), size=8)
    np.testing.assert_allclose(sink_kept(selection), [(2 / 4 + 1 / 4) / 2, 1 / 2])
    scores = np.arange(24, dtype=np.float32)
    scored = Selection(
        n_tokens=24,
        n_layers=1,
        n_layer_heads=2,
        begins=selection.begins,
        memory=selection.memory,
        scores=(scores, None),
    )
    np.testing.assert_allclose(sink_score(scored), [6 / scores.sum(), np.nan])


def test_patterns_hold_none_where_nothing_can_be_compared() -> None:
    selection = make_selection(([0, 3],))
    (head,) = describe_selection(selection, selection, None)
    assert (head.kept_keys, head.sink_kept, head.same_text_similarity) == (2, 0.5, 1)
    assert head.sink_score is head.next_chunk_similarity is None
    assert head.other_heads_similarity is head.other_text_similarity is None


PICTURES = {
    "kept_positions.png",
    "scores.png",
    "decode_reads.png",
    "layer_00.png",
    "layer_01.png",
    "layer_02.png",
    "sinks.png",
    "head_similarity.png",
    "similarity.png",
}


def test_every_picture_and_both_summaries_are_written(llm: LLM, tmp_path: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    folder = tmp_path / "a" / "b"
    report = visualize_attention_patterns(
        llm, TEXT, folder, context_size=WINDOW, on_progress=lambda *step: progress.append(step)
    )
    assert progress[-1] == ("evaluate", 4 * WINDOW, 4 * WINDOW)
    assert {path.name for path in folder.glob("*.png")} == PICTURES
    assert all(min(png_size(path)) > 400 for path in folder.glob("*.png"))
    assert [(head.layer, head.head) for head in report.heads] == [
        (layer, head) for layer in range(3) for head in range(2)
    ]
    assert {head.same_text_similarity for head in report.heads} == {1.0}
    assert all(0 < head.other_text_similarity < 1 for head in report.heads)
    assert {head.kept_keys for head in report.heads} == {8.0}
    with (folder / "summary.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row["sink_kept"]) for row in rows] == [head.sink_kept for head in report.heads]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["means"]["kept_keys"] == 8
    assert len(report.format_text().splitlines()) == 4 + 3 + 1


@pytest.mark.parametrize(("n_heads", "size"), [(1, (1320, 297)), (9, (2200, 825))])
def test_many_heads_of_a_layer_stand_side_by_side(
    n_heads: int, size: tuple[int, int], tmp_path: Path
) -> None:
    selection = make_selection(*(([0, 3],) * n_heads for _ in range(2)))
    draw_layer(selection, 0, tmp_path / "layer.png")
    assert png_size(tmp_path / "layer.png") == size


def test_dense_attention_keeps_all_and_has_no_scores(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    with load(tiny_model(tensor_type="F32"), DenseConfig()) as llm:
        text = llm.detokenize(tokens_of(llm, 40).tolist())
        report = visualize_attention_patterns(llm, text, tmp_path, context_size=40, layers=[1])
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == PICTURES - {"scores.png", "layer_00.png", "layer_02.png"}
    for head in report.heads:
        assert (head.sink_kept, head.next_chunk_similarity) == (1, 1)
        assert head.sink_score is head.other_text_similarity is None
        assert head.kept_keys == (16 + 32) / 2


def test_what_cannot_be_drawn_is_refused(llm: LLM, tmp_path: Path) -> None:
    for options, message in [
        ({"context_size": 16}, "one chunk of 16, which reads only itself"),
        ({"context_size": WINDOW, "layers": [3]}, "there is no layer 3: the model has 0 to 2"),
        ({"context_size": 100_000}, "too few"),
    ]:
        with pytest.raises(UsageError, match=message):
            visualize_attention_patterns(llm, TEXT, tmp_path, **options)


def test_a_missing_matplotlib_is_found_before_any_work(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"pip install 'edgeh2o\[plot\]'"):
        visualize_attention_patterns(llm, TEXT, tmp_path / "new", context_size=WINDOW)
    assert not (tmp_path / "new").exists()

"""Tables and JSON of a report."""

from __future__ import annotations

import json

import pytest

from bench.reporting import format_samples, markdown_table, write_report


def test_a_table_keeps_its_columns_when_a_cell_has_a_bar() -> None:
    assert markdown_table(["file", "tokens/s"], [["a|b.gguf", 12], ["c", "1,000"]]).split("\n") == [
        "| file      | tokens/s |",
        "| --------- | -------: |",
        "| a\\|b.gguf |       12 |",
        "| c         |    1,000 |",
    ]


def test_samples_show_the_median_and_the_extremes() -> None:
    assert format_samples([1200.4, 900, 1300]) == "1,200 (900 to 1,300)"
    assert format_samples([0.5, 0.25], digits=2) == "0.38 (0.25 to 0.50)"


def test_json_says_which_machine_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    write_report("json", ["unused"], [{"a": 1}])
    report = json.loads(capsys.readouterr().out)
    assert report["results"] == [{"a": 1}]
    assert set(report["machine"]) == {"cpu", "cores", "system", "python", "edgeh2o"}


def test_markdown_has_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    write_report("md", ["first", "second"], [])
    assert capsys.readouterr().out.endswith("\n\nfirst\n\nsecond\n")

"""Tables, CSV and JSON of results."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest

from edgeh2o.evaluation.reporting import (
    format_count,
    format_csv,
    format_estimate,
    format_json,
    format_samples,
    markdown_table,
)


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


def test_csv_keeps_cells_with_commas_and_quotes_apart() -> None:
    records = [{"name": 'a, "b"', "value": 1.5}, {"name": "c", "value": None}]
    text = format_csv(records)
    assert text.startswith("name,value\n")
    assert not text.endswith("\n")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows == [{"name": 'a, "b"', "value": "1.5"}, {"name": "c", "value": ""}]


def test_json_says_which_machine_it_was() -> None:
    report = json.loads(format_json({"value": 2, "name": "\u00e9"}))
    assert (report["value"], report["name"]) == (2, "\u00e9")
    assert set(report["machine"]) == {"cpu", "cores", "system", "python", "edgeh2o"}


def test_what_is_not_known_is_null_an_empty_field_and_a_dash() -> None:
    nan = float("nan")
    report = json.loads(
        format_json({"rows": ({"error": nan}, {"error": -math.inf})}),
        parse_constant=lambda name: pytest.fail(f"{name} is not JSON"),
    )
    assert report["rows"] == [{"error": None}, {"error": None}]
    assert format_csv([{"value": 1.5, "error": nan}]) == "value,error\n1.5,"
    assert format_estimate(1.5, nan, 1) == "1.5 +- -"


def test_counts_know_their_plural() -> None:
    assert [format_count(n, "window") for n in (0, 1, 1200)] == [
        "0 windows",
        "1 window",
        "1,200 windows",
    ]


def test_estimates_carry_their_error() -> None:
    assert format_estimate(1234.5, 0.126) == "1,234.50 +- 0.13"
    assert format_estimate(0.5, 0.25, 1, sign="+") == "+0.5 +- 0.2"

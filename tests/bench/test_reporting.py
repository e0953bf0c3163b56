"""Tables and JSON of a report."""

from __future__ import annotations

import json

import pytest

from bench.reporting import write_report


def test_json_says_which_machine_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    write_report("json", ["unused"], [{"a": 1}])
    report = json.loads(capsys.readouterr().out)
    assert report["results"] == [{"a": 1}]
    assert set(report["machine"]) == {"cpu", "cores", "system", "python", "edgeh2o"}


def test_markdown_has_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    write_report("md", ["first", "second"], [])
    assert capsys.readouterr().out.endswith("\n\nfirst\n\nsecond\n")

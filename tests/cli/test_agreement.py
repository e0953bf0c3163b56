"""``edgeh2o agreement`` on a tiny model: its formats and its errors."""

from __future__ import annotations

import csv
import io
import json

import pytest

from edgeh2o.cli.main import main
from tests.cli.conftest import ExpectUsageError

SIZES = ["--ctx", "96", "--prompts", "2", "--tokens", "5", "-b", "32", "-ub", "16"]
ATTENTION = ["--h2o-local", "4", "--h2o-heavy", "4"]


@pytest.fixture
def arguments(model: str, text: str) -> list[str]:
    return ["agreement", model, "-f", text, *SIZES, *ATTENTION]


def test_every_format_has_every_prompt(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ": 2 prompts of 96 tokens, 5 greedy tokens" in lines[0]
    assert [line.split("|")[2].strip() for line in lines[-2:]] == ["16", "16"]
    assert main([*arguments, "-o", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert main([*arguments, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [int(row["sparse_n_equal"]) for row in rows] == [
        prompt["n_equal"] for prompt in report["sparse"]["prompts"]
    ]
    assert report["floor"]["summary"]["prompts"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "99"], "too few for 99 windows of 96"),
        (["--tokens", "0"], "number of tokens must be at least 1"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], options: list[str], message: str, expect_usage_error: ExpectUsageError
) -> None:
    expect_usage_error(main([*arguments, *options]), message)

"""What the tests of the verbs share: a model, a text, the look of a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import TinyModelFactory

ExpectUsageError = Callable[[int, str], None]


@pytest.fixture
def model(tiny_model: TinyModelFactory) -> str:
    """Path of a tiny model."""
    return str(tiny_model(tensor_type="Q4_0"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Path of a text of some hundred tokens."""
    path = tmp_path / "text.txt"
    path.write_text("the thing is that the art is there and the hen is in the pen " * 12)
    return str(path)


@pytest.fixture
def expect_usage_error(capsys: pytest.CaptureFixture[str]) -> ExpectUsageError:
    """``expect_usage_error(exit_code, part)``: one line on stderr that has ``part``, code 2."""

    def expect(code: int, part: str) -> None:
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, "")
        assert captured.err.startswith("edgeh2o: error: ")
        assert part in captured.err
        assert captured.err.count("\n") == 1

    return expect

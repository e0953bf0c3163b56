"""What the log of a verb looks like."""

from __future__ import annotations

import logging

import pytest

from edgeh2o.cli.model_options import show_warnings


def test_lines_say_what_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ``serve -v`` tells was called a warning."""
    monkeypatch.setattr(logging.root, "handlers", [])
    show_warnings()
    logger = logging.getLogger("edgeh2o.serving")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        logger.warning("it is %d", 1)
        logger.info("told")
    finally:
        logger.setLevel(before)
    assert capsys.readouterr().err == "edgeh2o: warning: it is 1\nedgeh2o: told\n"

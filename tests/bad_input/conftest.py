"""The ``refusal`` fixture."""

from __future__ import annotations

import pytest

from tests.bad_input.refusal import Refusal


@pytest.fixture(scope="session", autouse=True)
def _imports_done() -> None:
    """Modules that the first run would load count as no allocation of the run."""
    import edgeh2o.llm
    import edgeh2o.runners.native  # noqa: F401


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(capsys)

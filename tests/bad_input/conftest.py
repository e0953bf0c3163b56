"""The ``refusal`` fixture."""

from __future__ import annotations

from contextlib import suppress

import pytest

from edgeh2o import LLM, EdgeH2OError
from tests.bad_input.refusal import Refusal
from tests.tiny_models import TinyModelFactory


@pytest.fixture(scope="session", autouse=True)
def _imports_done(tiny_model: TinyModelFactory, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Modules that the first run would load count as no allocation of the run."""
    LLM(tiny_model(tensor_type="Q4_0"), check_tensors=True).close()
    with suppress(EdgeH2OError):
        LLM(tmp_path_factory.mktemp("no_model"))


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(capsys)

"""How many frames of edgeh2o lie between a verb and the call into the core for its first token."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

import edgeh2o
from edgeh2o.cli.main import main
from tests.tiny_models import TinyModelFactory

MAX_FRAMES = 10
PACKAGE = str(Path(edgeh2o.__file__).parent)


def _frames_up_to_execute(frame: FrameType | None) -> list[str]:
    """Names of the functions of edgeh2o that are running, innermost first."""
    names: list[str] = []
    while "execute" not in names and frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


@pytest.mark.parametrize("flags", [[], ["--chat"], ["--json"]])
def test_the_first_token_passes_few_frames(tiny_model: TinyModelFactory, flags: list[str]) -> None:
    seen: list[list[str]] = []

    def watch(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and getattr(called, "__name__", "") == "prefill":
            seen.append(_frames_up_to_execute(frame))

    model = str(tiny_model())
    sys.setprofile(watch)
    try:
        code = main(["run", model, "-p", "the thing", "-n", "1", *flags])
    finally:
        sys.setprofile(None)
    assert code == 0
    assert len(seen) == 1
    assert "execute" in seen[0]
    assert len(seen[0]) <= MAX_FRAMES, seen[0]

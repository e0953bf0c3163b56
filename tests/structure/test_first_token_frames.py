"""How many frames of edgeh2o lie between a verb and the call that computes its first token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import edgeh2o
from edgeh2o.cli.main import main
from edgeh2o.runners.native import NativeRunner
from tests.tiny_models import TinyModelFactory

MAX_FRAMES = 10
PACKAGE = str(Path(edgeh2o.__file__).parent)


def _frames_up_to_execute() -> list[str]:
    """Names of the functions of edgeh2o that are running, innermost first."""
    names, frame = [], sys._getframe(1)
    while "execute" not in names and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_name)
    return names


@pytest.mark.parametrize("flags", [[], ["--chat"], ["--json"]])
def test_the_first_token_passes_few_frames(
    tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    seen: list[list[str]] = []
    prefill = NativeRunner.prefill

    def watch(runner: NativeRunner, *args: Any, **options: Any) -> Any:
        seen.append([*_frames_up_to_execute(), "prefill"])
        return prefill(runner, *args, **options)

    monkeypatch.setattr(NativeRunner, "prefill", watch)
    assert main(["run", str(tiny_model()), "-p", "the thing", "-n", "1", *flags]) == 0
    assert len(seen) == 1
    assert "execute" in seen[0]
    assert len(seen[0]) <= MAX_FRAMES, seen[0]

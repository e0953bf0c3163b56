"""Damaged files are opened or refused; nothing else happens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgeh2o.errors import EdgeH2OError
from tools.fuzz_loop import mutate
from tools.fuzz_onnx import make_seeds, make_target


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_files(tmp_path: Path, seed: int) -> None:
    seeds = make_seeds(tmp_path / "model")
    target = make_target(tmp_path / "model")
    for content in seeds:
        target(content)
    generator = random.Random(seed)
    n_refused = 0
    for _ in range(60):
        try:
            target(mutate(generator, seeds))
        except EdgeH2OError:
            n_refused += 1
    assert 0 < n_refused < 60

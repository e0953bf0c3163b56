"""Damaged files are opened or refused; nothing else happens."""

from __future__ import annotations

import pytest

from tools.fuzz_onnx import fuzz


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_files(seed: int) -> None:
    n_tried, n_refused = fuzz(60.0, seed, limit=60)
    assert 0 < n_refused < n_tried

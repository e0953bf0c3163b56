"""Attention tests run once per instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgeh2o import _core


@pytest.fixture(params=_core.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Forces one instruction set for the objects made in the test; tests/conftest.py ends it."""
    _core.use_isa(request.param)
    return request.param


@pytest.fixture
def keep_threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = _core.num_threads()
    yield
    _core.set_num_threads(before)

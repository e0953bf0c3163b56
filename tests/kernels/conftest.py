"""Every kernel test runs once per instruction set of this machine."""

from __future__ import annotations

import pytest

from edgeh2o import _core


@pytest.fixture(params=_core.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param

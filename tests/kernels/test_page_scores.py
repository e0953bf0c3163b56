"""Products of query rows with blocks of pages that lie channel by channel."""

from __future__ import annotations

import numpy as np
import pytest

from edgeh2o import _kernels
from tests.reference.cached_rows import stored


@pytest.mark.parametrize("n_rows", [1, 3, 4, 9])
@pytest.mark.parametrize(
    ("width", "channels"), [(2, None), (40, None), (40, [0]), (40, [3, 17, 39]), (256, None)]
)
def test_equals_the_product(isa: str, n_rows: int, width: int, channels: list[int] | None) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, width, 32)).astype(np.float32)
    blocks = np.array(
        [[_kernels.store_kv_row(isa, "q8_0", row) for row in block] for block in values]
    )
    q = rng.standard_normal((n_rows, width)).astype(np.float32)
    counted = list(range(width)) if channels is None else channels
    listed = np.array(counted, np.int32)
    out = _kernels.score_blocks(isa, q, blocks, listed)
    expected = np.einsum("rc,bcp->rbp", q[:, counted], stored(values, "q8_0")[:, counted])
    np.testing.assert_allclose(out, expected.reshape(n_rows, -1), rtol=0, atol=1e-4)
    # A row's result does not depend on the others.
    np.testing.assert_array_equal(out[-1:], _kernels.score_blocks(isa, q[-1:], blocks, listed))

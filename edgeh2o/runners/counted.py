"""What runners have of the part of them that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class CountedRunner:
    """The counters of a ``Runner`` (edgeh2o/runners/base.py), of the part of it that has them."""

    _counted: Any

    @property
    def prefill_end(self) -> int:
        return int(self._counted.prefill_end)

    @property
    def pairs_computed(self) -> int:
        return int(self._counted.pairs_computed)

    @property
    def pairs_dense(self) -> int:
        return int(self._counted.pairs_dense)

    @property
    def decode_bytes(self) -> int:
        return int(self._counted.decode_bytes)

    @property
    def error_sums(self) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = self._counted.error_sums
        return sums

    @property
    def n_dense_reads(self) -> int:
        return int(self._counted.n_dense_reads)

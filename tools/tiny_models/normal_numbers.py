"""Normal numbers of a seed, drawn once for all tiny models that have it: half of writing one."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray


class _Drawn:
    """The numbers of a generator from its first on, as many as were asked for so far."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._numbers = self._rng.standard_normal(1 << 16)

    def get(self, first: int, n: int) -> NDArray[np.float64]:
        missing = first + n - self._numbers.size
        if missing > 0:
            more = self._rng.standard_normal(max(missing, self._numbers.size))
            self._numbers = np.concatenate([self._numbers, more])
        return self._numbers[first : first + n]


_drawn = lru_cache(maxsize=4)(_Drawn)


class NormalNumbers:
    """What ``default_rng(seed).standard_normal(shape)`` gives, call after call."""

    def __init__(self, seed: int) -> None:
        self._drawn = _drawn(seed)
        self._n_taken = 0

    def standard_normal(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """float64 of this shape; a view, not to be written to."""
        n = prod(shape)
        numbers = self._drawn.get(self._n_taken, n)
        self._n_taken += n
        return numbers.reshape(shape)

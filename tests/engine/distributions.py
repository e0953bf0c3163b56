"""Distributions that samplers draw from, and the softmax of their definitions in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeh2o.engine._sampler import Sampler


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shares = np.exp(values - values.max())
    total: NDArray[np.float64] = shares / shares.sum()
    return total


def distribution_of(sampler: Sampler, logits: NDArray[np.float32]) -> dict[int, float]:
    """Token -> probability, most likely first, equal ones by their ids."""
    found = zip(*map(np.ndarray.tolist, sampler.distribution(logits)), strict=True)
    return dict(sorted(found, key=lambda pair: (-pair[1], pair[0])))

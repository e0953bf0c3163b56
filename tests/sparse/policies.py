"""Every built-in sparse policy with its oracle: a new algorithm is tested by one more row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edgeh2o import _core
from tests.reference.dense import DenseLayer
from tests.reference.h2o import H2OLayer
from tests.reference.softmax_state import Array


class Oracle(Protocol):
    def prefill(self, q: Array, k: Array, v: Array) -> Array: ...

    def decode(self, q: Array, k: Array, v: Array) -> Array: ...


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """A policy and its oracle.

    Attributes:
        name: shown in the test id.
        make_policy: the compiled policy.
        make_oracle: the oracle of a chunk size.
        budget: positions of a full memory set; None for the whole past.
    """

    name: str
    make_policy: Callable[[], _core.SparsePolicy]
    make_oracle: Callable[[int], Oracle]
    budget: int | None

    def __str__(self) -> str:
        return self.name


def h2o_case(local: int, heavy: int) -> PolicyCase:
    return PolicyCase(
        f"h2o-{local}-{heavy}",
        lambda: _core.h2o_policy(local, heavy),
        lambda chunk_size: H2OLayer(chunk_size=chunk_size, local=local, heavy=heavy),
        local + heavy,
    )


DENSE = PolicyCase("dense", _core.dense_policy, lambda _: DenseLayer(), None)

POLICIES = [DENSE, h2o_case(16, 16), h2o_case(0, 20), h2o_case(20, 0), h2o_case(100, 70)]
